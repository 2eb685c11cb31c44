import subprocess
import sys
import types

import numpy as np
import pytest

from equipoise_model.train import data
from equipoise_model.train.data import DOMAINS, CorpusError, heldout_prompts, sample_batch, text


@pytest.fixture
def fresh_text():
    """Text is read once a process; a test that moves the library reads it again."""
    data.text.cache_clear()
    data._library.cache_clear()
    yield
    data.text.cache_clear()
    data._library.cache_clear()


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_are_distinct_ascii_within_their_lengths_and_from_heldout_text(domain):
    prompts = heldout_prompts(domain, num_prompts=40, seed=3, min_bytes=48, max_bytes=96)
    heldout = text(domain, "heldout").tobytes()
    assert len(set(prompts)) == 40
    assert all(48 <= len(prompt) <= 96 for prompt in prompts)
    assert all(prompt.isascii() and prompt in heldout for prompt in prompts)


def test_prompts_depend_on_the_seed_and_on_nothing_else():
    first = heldout_prompts("english", num_prompts=8, seed=1)
    assert heldout_prompts("english", num_prompts=8, seed=1) == first
    assert heldout_prompts("english", num_prompts=8, seed=2) != first


def test_more_prompts_than_there_is_text_for_are_rejected_by_name():
    with pytest.raises(CorpusError, match="'arithmetic'"):
        heldout_prompts("arithmetic", num_prompts=1_000_000, seed=0)


def test_no_arithmetic_problem_is_in_both_splits():
    problems = {
        split: {line.split(b" =")[0] for line in text("arithmetic", split).tobytes().split(b"\n")}
        for split in ("train", "heldout")
    }
    assert not problems["train"] & problems["heldout"]
    assert len(problems["heldout"]) > 1000


def test_arithmetic_answers_are_right():
    for line in text("arithmetic", "heldout").tobytes().decode().splitlines()[:200]:
        left, sign, right, _, answer = line.split()
        expected = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign]
        assert expected(int(left), int(right)) == int(answer)


def test_a_file_belongs_to_one_split_for_ever():
    assert {data.split_of(f"file{i}.py") for i in range(200)} == {"train", "heldout"}
    assert data.split_of("ast.py") == data.split_of("ast.py")


def test_code_is_what_remains_without_comments_and_docstrings():
    source = '# why\nimport os\n\ndef f():\n    """Say\n    it."""\n    return os\n'
    code, docstrings = data._without_docstrings(source)
    assert code == "import os\n\ndef f():\n    return os\n"
    assert docstrings == ["Say\n    it."]


def test_prose_is_whole_paragraphs_of_sentences_in_even_lines():
    sentences = "Words that somebody wrote for others,\n   and wrapped where they liked, " * 3
    document = f"{sentences}\n\nf(x, *, y=1) -> z[0] {{'a': 1}} " + "_" * 80 + "\n\nToo short."
    (paragraph,) = data._prose(document)
    assert paragraph.split() == sentences.split()
    assert max(map(len, paragraph.splitlines())) <= 96


def test_files_that_cannot_be_parsed_or_decoded_are_left_out(tmp_path, monkeypatch, fresh_text):
    names = [name for name in (f"m{i}.py" for i in range(400)) if data.split_of(name) == "heldout"]
    (tmp_path / names[0]).write_text("x = 1\n" * 2000)
    (tmp_path / names[1]).write_text("def broken(:\n")
    (tmp_path / names[2]).write_bytes(b"\xff\xfe\x00")
    (tmp_path / names[3]).symlink_to(tmp_path / "gone.py")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    assert text("code", "heldout").tobytes() == b"x = 1\n" * 2000


def test_an_installation_without_source_is_rejected_with_the_remedy(
    tmp_path, monkeypatch, fresh_text
):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(CorpusError, match="standard-library source"):
        text("code", "heldout")


def test_english_does_without_missing_topics(monkeypatch, fresh_text):
    with_topics = text("english", "heldout").size
    data.text.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data", types.ModuleType("pydoc_data"))
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    assert 0 < text("english", "heldout").size < with_topics


def test_rows_of_a_batch_are_windows_of_their_domains_in_turn():
    rng = np.random.default_rng(0)
    batch = sample_batch(rng, num_sequences=6, num_tokens=64, split="heldout")
    assert batch.shape == (6, 64)
    assert batch.dtype == np.int64
    for row, tokens in enumerate(batch):
        window = bytes(tokens.tolist())
        assert window in text(DOMAINS[row % 3], "heldout").tobytes()


_PROMPTS_WITHOUT_PACKAGE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("data", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.heldout_prompts("arithmetic", num_prompts=2, seed=0)
assert "torch" not in sys.modules
"""


def test_the_module_of_prompts_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", _PROMPTS_WITHOUT_PACKAGE, data.__file__],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

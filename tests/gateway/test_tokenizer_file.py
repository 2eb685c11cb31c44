"""tokenizer.json is encoded and decoded as by Hugging Face's library."""

import json
import threading
import time
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from equipoise.gateway.errors import GatewayError, InvalidRequestError
from equipoise.gateway.fields import Fields
from equipoise.gateway.prompts import PromptReader
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.tokenizer import Tokenizer

CORPUS = ["def balance(layout): return layout", "Ĝis la ☃ 🜁, naïve Straße", "12 + 30 = 42"] * 9
END, BEGIN, THINK = "<end>", "<begin>", "<think>"


def trained():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END, BEGIN],
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([THINK])
    return tokenizer


THEIRS = trained()
VOCAB_SIZE = THEIRS.get_vocab_size() + 5  # models have tokens to spare


@pytest.fixture
def folder(tmp_path):
    """A function that writes a checkpoint's small files."""

    def write(*, config=None, tokenizer=None, tokenizer_config=None):
        config = {"vocab_size": VOCAB_SIZE, "eos_token_id": [0]} | (config or {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_text(tokenizer or THEIRS.to_str())
        if tokenizer_config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": [0]}))
    (path / "tokenizer.json").write_text(THEIRS.to_str())
    return Tokenizer.of_checkpoint(path)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encoding_and_decoding_match_the_library(ours, text):
    tokens = ours.encode(text)
    assert list(tokens) == THEIRS.encode(text).ids
    if END not in text and BEGIN not in text:
        assert ours.decode(tokens) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, THEIRS.get_vocab_size() - 1), max_size=40))
def test_any_tokens_decode_as_in_the_library_also_one_by_one(ours, tokens):
    assert ours.decode(tokens) == THEIRS.decode(tokens, skip_special_tokens=True)
    spelling = ours.decoder()
    one_by_one = [spelling.read((token,), final=False) for token in tokens]
    assert "".join(one_by_one) + spelling.read((), final=True) == ours.decode(tokens)


def test_special_and_spare_tokens_have_no_text_and_added_ones_have_theirs(ours):
    assert ours.vocab_size == VOCAB_SIZE
    assert ours.end_tokens == {0}
    assert ours.decode([0, 1, VOCAB_SIZE - 1]) == ""
    assert ours.decode([THEIRS.token_to_id(THINK)]) == THINK


def test_the_first_token_follows_the_tokenizer_config(folder):
    tokenizer = Tokenizer.of_checkpoint(
        folder(tokenizer_config={"add_bos_token": True, "bos_token": {"content": BEGIN}})
    )
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a", begins=False) == tokenizer.encode("a")[1:]
    assert tokenizer.encode(BEGIN + "a") == tokenizer.encode("a")


def test_a_completion_may_leave_out_the_first_token(folder):
    path = folder(tokenizer_config={"add_bos_token": True, "bos_token": BEGIN})
    tokenizer = Tokenizer.of_checkpoint(path)
    reader = PromptReader(GatewaySettings(checkpoint=path), tokenizer=tokenizer, template=None)
    fields = {"prompt": ["a", "b"]}
    expected = tuple(tokenizer.encode(text) for text in "ab")
    assert reader.completion(Fields(fields)) == expected
    bare = reader.completion(Fields({**fields, "add_special_tokens": False}))
    assert bare == tuple(tokens[1:] for tokens in expected)
    with pytest.raises(InvalidRequestError, match="add_special_tokens must be true or false"):
        reader.completion(Fields({"prompt": [1, 2], "add_special_tokens": "no"}))


def changed(**fields):
    return json.dumps(json.loads(THEIRS.to_str()) | fields)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer": "{"}, "not a valid tokenizer"),
        ({"tokenizer": "[]"}, "not a valid tokenizer"),
        ({"tokenizer": changed(decoder={"type": "Fuse"})}, "decoder 'Fuse' is not supported"),
        ({"tokenizer": changed(decoder=None)}, "decoder None is not supported"),
        ({"config": {"vocab_size": 10}}, "vocab_size 10: use files of one model"),
        (
            {"tokenizer_config": {"add_bos_token": True, "bos_token": "<none>"}},
            "bos_token '<none>' is not in tokenizer.json",
        ),
        ({"tokenizer_config": {"add_bos_token": True}}, "bos_token None is not in tokenizer.json"),
        ({"tokenizer_config": []}, "tokenizer_config.json: not a JSON object"),
    ],
)
def test_an_invalid_tokenizer_file_is_a_one_line_error(folder, files, words):
    with pytest.raises(GatewayError, match=words):
        Tokenizer.of_checkpoint(folder(**files))


def test_truncation_and_padding_of_the_file_do_not_apply(folder):
    document = json.loads(THEIRS.to_str())
    limits = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    document["truncation"] = limits
    document["padding"] = {
        "strategy": {"Fixed": 99},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END,
    }
    tokenizer = Tokenizer.of_checkpoint(folder(tokenizer=json.dumps(document)))
    assert tokenizer.encode(CORPUS[0]) == tuple(THEIRS.encode(CORPUS[0]).ids)


def test_other_threads_run_while_a_long_text_is_encoded(ours):
    text, ticks, done = " ".join(CORPUS) * 600, [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    while not ticks:
        time.sleep(0.001)
    began = time.perf_counter()
    ours.encode(text)
    duration_s = time.perf_counter() - began
    done.set()
    ticking.join()
    times = [began, *(one for one in ticks if one > began), began + duration_s]
    longest_s = max(after - before for before, after in pairwise(times))
    assert longest_s < max(0.1, duration_s / 3), f"{longest_s:.2f} of {duration_s:.2f} s"


def test_special_tokens_have_text_on_request(ours):
    begin, end = (THEIRS.token_to_id(name) for name in (BEGIN, END))
    decoder = ours.decoder(with_special=True)
    assert decoder.read((begin, *THEIRS.encode("12").ids, end), final=True) == f"{BEGIN}12{END}"
    assert ours.decode((begin, *THEIRS.encode("12").ids, end)) == "12"

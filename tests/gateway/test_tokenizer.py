"""Text is the same however its tokens come, and a stop string cuts it at the same place."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.errors import GatewayError
from equipoise.gateway.tokenizer import ByteTokenizer, Spelling, StopText

texts = st.text(st.characters(exclude_categories=["Cs"]))


def pieces(values, cuts):
    edges = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    return [values[start:end] for start, end in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 100), max_size=6)


@settings(deadline=None)
@given(texts, cuts)
def test_text_comes_back_however_its_tokens_are_grouped(text, cuts):
    tokens = ByteTokenizer(vocab_size=272, end_token=257).encode(text)
    spelling = Spelling()
    read = [spelling.read(part, final=False) for part in pieces(tokens, cuts)]
    assert "".join(read) + spelling.read((), final=True) == text


@settings(deadline=None)
@given(st.binary(), cuts)
def test_bytes_that_are_no_text_read_the_same_however_they_are_grouped(data, cuts):
    spelling = Spelling()
    read = [spelling.read(tuple(part), final=False) for part in pieces(data, cuts)]
    assert "".join(read) + spelling.read((), final=True) == data.decode(errors="replace")


@settings(deadline=None)
@given(texts, cuts)
def test_no_piece_has_half_a_character(text, cuts):
    spelling = Spelling()
    for part in pieces(text.encode(), cuts):
        read = spelling.read(tuple(part), final=False)
        assert "\ufffd" not in read or "\ufffd" in text


def test_special_tokens_have_no_text():
    assert Spelling().read((104, 256, 105, 257), final=True) == "hi"


@settings(deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts,
)
def test_text_ends_before_the_first_stop_string(text, stops, cuts):
    stop = StopText(tuple(stops))
    read = "".join(stop.read(part, final=False) for part in pieces(text, cuts))
    read += stop.read("", final=True)
    complete = [(text.find(one) + len(one), text.find(one)) for one in stops if one in text]
    assert stop.stopped == bool(complete)
    assert read == (text[: min(complete)[1]] if complete else text)


def test_only_what_may_begin_a_stop_string_is_held_back():
    stop = StopText(("END",))
    assert stop.read("one E", final=False) == "one "
    assert stop.read("x EN", final=False) == "Ex "
    assert stop.read("", final=True) == "EN"


def test_the_checkpoint_says_what_tokens_there_are(tmp_path):
    config = {"vocab_size": 272, "eos_token_id": 257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = ByteTokenizer.of_checkpoint(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_token) == (272, 257)
    assert tokenizer.encode("é") == (195, 169)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "no model's config"),
        ("[]", "no model's config"),
        ('{"vocab_size": 129280}', "129280 is not that of a model whose tokens are bytes"),
        ('{"vocab_size": 272, "eos_token_id": 272}', "eos_token_id 272 is out of the vocabulary"),
    ],
)
def test_a_checkpoint_that_cannot_be_spelled_is_one_line(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(GatewayError, match=words):
        ByteTokenizer.of_checkpoint(tmp_path)

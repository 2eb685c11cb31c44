"""Decoded text does not depend on how its tokens are grouped."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.errors import GatewayError
from equipoise.gateway.tokenizer import TokenDecoder, Tokenizer

BYTES = [*(bytes([byte]) for byte in range(256)), *[b""] * 16]
texts = st.text(st.characters(exclude_categories=["Cs"]))


def merged_deltas(values, cuts):
    edges = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    return [values[start:end] for start, end in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 100), max_size=6)


@settings(deadline=None)
@given(texts, cuts)
def test_text_does_not_depend_on_how_tokens_are_grouped(text, cuts):
    spelling = TokenDecoder(BYTES)
    tokens = text.encode()
    read = [spelling.read(part, final=False) for part in merged_deltas(tokens, cuts)]
    assert "".join(read) + spelling.read((), final=True) == text


@settings(deadline=None)
@given(st.binary(), cuts)
def test_invalid_utf8_does_not_depend_on_how_tokens_are_grouped(data, cuts):
    spelling = TokenDecoder(BYTES)
    read = [spelling.read(tuple(part), final=False) for part in merged_deltas(data, cuts)]
    assert "".join(read) + spelling.read((), final=True) == data.decode(errors="replace")


@settings(deadline=None)
@given(texts, cuts)
def test_no_part_has_half_a_character(text, cuts):
    spelling = TokenDecoder(BYTES)
    for part in merged_deltas(text.encode(), cuts):
        read = spelling.read(tuple(part), final=False)
        assert "\ufffd" not in read or "\ufffd" in text


def test_special_tokens_have_no_text():
    assert TokenDecoder(BYTES).read((104, 256, 105, 257), final=True) == "hi"


def test_the_checkpoint_defines_the_vocabulary(tmp_path):
    config = {"vocab_size": 272, "eos_token_id": 257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.of_checkpoint(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_tokens) == (272, {257})
    assert tokenizer.encode("é") == (195, 169)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "not a model's config"),
        ("[]", "not a model's config"),
        ('{"vocab_size": 129280}', "vocab_size 129280 are not bytes"),
        ('{"vocab_size": 272, "eos_token_id": 272}', "eos_token_id 272 is not in the vocabulary"),
    ],
)
def test_an_unsupported_checkpoint_is_a_one_line_error(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(GatewayError, match=words):
        Tokenizer.of_checkpoint(tmp_path)

"""Text and logprobs arrive together, whatever ends the choice."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.choice import ChoiceDecoder, merged_deltas
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.gateway.tool_calls import ToolCallSplit, merged
from equipoise.gateway.tool_formats import FORMATS, ToolCallParser
from equipoise.wire.inference_messages import FinishReason, GeneratedTokens, TokenLogprob

END = 257
TOKENIZER = Tokenizer(
    bytes_of=(*(bytes([byte]) for byte in range(256)), *[b""] * 16),
    end_tokens=frozenset({END}),
    encode_text=lambda text, _: text.encode(),
)


def made(tokens, finish=None):
    logprobs = tuple(TokenLogprob(value=-float(token), top=()) for token in tokens)
    return GeneratedTokens(tokens=tuple(tokens), finish=finish, logprobs=logprobs)


def read(tokens, *, cuts=(), stops=(), finish=FinishReason.LENGTH):
    """All merged_deltas of an answer that comes in parts."""
    choice = ChoiceDecoder(TOKENIZER, stops=tuple(stops), stop_tokens=frozenset({END}))
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    read = []
    for start, end in itertools.pairwise(edges):
        is_last = end == len(tokens)
        read.append(choice.read(made(tokens[start:end], finish if is_last else None)))
        if read[-1].finish is not None:
            break
    return read


@settings(deadline=None)
@given(
    st.text("ab☃é", min_size=1, max_size=20),
    st.lists(st.text("ab☃é", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_tokens_appear_with_their_text_and_never_earlier(text, stops, cuts):
    tokens = text.encode()
    got = read(tokens, cuts=cuts, stops=stops)
    ends = [(text.find(one) + len(one), text.find(one)) for one in stops if one in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(piece.text for piece in got) == expected
    assert got[-1].finish is (FinishReason.STOP if ends else FinishReason.LENGTH)
    used = [token for piece in got for token in piece.tokens]
    assert bytes(used) == (text[: min(ends)[0]] if ends else text).encode()
    shown = [one for piece in got for one in piece.shown]
    assert bytes(one.token for one in shown) == expected.encode()
    num_shown = 0
    for piece in got:
        num_shown += len(piece.text)
        assert all(one.offset < num_shown for one in piece.shown)
    for one in shown:
        assert one.offset == len(expected.encode()[: shown.index(one)].decode(errors="ignore"))


def test_the_stop_token_is_not_part_of_the_text():
    (piece,) = read([*b"ab", END], finish=FinishReason.STOP)
    assert piece.text == "ab"
    assert piece.tokens == (97, 98, END)
    assert [one.token for one in piece.shown] == [97, 98]


def test_incomplete_characters_are_emitted_at_the_end():
    first, last = read(b"a\xe2\x98", cuts=[2])
    assert (first.text, last.text) == ("a", "\ufffd")
    assert [one.token for one in last.shown] == [0xE2, 0x98]


@pytest.mark.parametrize("with_special", [False, True])
def test_markers_of_calls_are_read_even_if_they_are_special_tokens(with_special):
    special = {260: b"<tool_call>", 261: b"</tool_call>", 262: b"<other>"}
    tokenizer = replace(TOKENIZER, special=special)
    choice = ChoiceDecoder(
        tokenizer,
        stops=(),
        stop_tokens=frozenset({END}),
        with_special=with_special,
        tools=ToolCallSplit(FORMATS[ToolCallParser.HERMES]),
    )
    call = b'{"name": "f", "arguments": {"a": 1}}'
    tokens = [*b"hi", 262, 260, *call, 261, END]
    parts = [
        choice.read(made([token], FinishReason.STOP if token == END else None)) for token in tokens
    ]
    assert "".join(part.text for part in parts) == ("hi<other>" if with_special else "hi")
    (made_call,) = merged(call for part in parts for call in part.calls)
    assert (made_call.name, made_call.arguments) == ("f", '{"a": 1}')
    assert [part.ends_with_calls for part in parts] == [False] * (len(tokens) - 1) + [True]


async def test_choices_are_interleaved_as_they_arrive_and_closing_ends_all():
    ended = []

    async def endless(name):
        try:
            while True:
                yield made(b"a")
        finally:
            ended.append(name)

    async def short():
        yield made(b"b", FinishReason.LENGTH)

    def choice():
        return ChoiceDecoder(TOKENIZER, stops=(), stop_tokens=frozenset())

    coming = merged_deltas([(choice(), endless(0)), (choice(), short()), (choice(), endless(2))])
    seen = [await anext(coming) for _ in range(7)]
    assert [piece.finish for index, piece in seen if index == 1] == [FinishReason.LENGTH]
    assert {index for index, _ in seen} == {0, 1, 2}
    await coming.aclose()
    assert sorted(ended) == [0, 2]


async def test_an_error_in_one_choice_ends_the_others():
    ended = []

    async def endless():
        try:
            while True:
                yield made(b"a")
        finally:
            ended.append(True)

    async def broken():
        raise ValueError("as the script says")
        yield made(b"a")

    def choice():
        return ChoiceDecoder(TOKENIZER, stops=(), stop_tokens=frozenset())

    with pytest.raises(ValueError, match="script"):
        [piece async for piece in merged_deltas([(choice(), endless()), (choice(), broken())])]
    assert ended == [True]

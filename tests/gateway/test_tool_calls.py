"""Calls are separated from a text, however it is cut, and nothing that is written is lost."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.tool_calls import ToolCallSplit, merged
from equipoise.gateway.tool_formats import FORMATS, PLAIN_JSON, ToolCallParser

DEEPSEEK, HERMES = FORMATS[ToolCallParser.DEEPSEEK_V3], FORMATS[ToolCallParser.HERMES]
DEEPSEEK_V31 = FORMATS[ToolCallParser.DEEPSEEK_V31]
DEEPSEEK_V32 = FORMATS[ToolCallParser.DEEPSEEK_V32]
CALLS, END_CALLS = DEEPSEEK.structure
(SEP,) = DEEPSEEK.other_special
ARGUMENTS = st.dictionaries(
    st.text('ab{"\\', max_size=3),
    st.one_of(st.integers(), st.text('{}"\\é<>`', max_size=6), st.lists(st.dictionaries(
        st.just("x"), st.none(), max_size=1), max_size=2)),
    max_size=3,
).map(json.dumps)  # fmt: skip
NAMES = st.sampled_from(["f", "get_weather", "a-b.c"])


def deepseek(name, arguments):
    return f"{DEEPSEEK.begin}function{SEP}{name}\n```json\n{arguments}\n```{DEEPSEEK.end}"


def deepseek_v31(name, arguments):
    """As the chat template of DeepSeek-V3.1 and its model card write a call."""
    return f"{DEEPSEEK.begin}{name}{SEP}{arguments}{DEEPSEEK.end}"


def dsml_values(arguments):
    """Arguments as DeepSeek-V3.2's encoding.py writes them."""
    return "\n".join(
        f'<\uff5cDSML\uff5cparameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        "</\uff5cDSML\uff5cparameter>"
        for name, value in json.loads(arguments).items()
    )


def dsml(name, arguments):
    return f'{DEEPSEEK_V32.begin} name="{name}">\n{dsml_values(arguments)}\n{DEEPSEEK_V32.end}'


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def read(form, parts, **options):
    """The content and the calls of a text in parts, and the reader after it."""
    split = ToolCallSplit(form, **options)
    texts, calls = [], []
    for index, part in enumerate(parts):
        text, more = split.read(part, final=index == len(parts) - 1)
        texts.append(text)
        calls += more
    return "".join(texts), [(call.name, call.arguments) for call in merged(calls)], split


def check_any_cut(form, text, cuts, **options):
    """The same result in one part, letter by letter, and cut at will; returns it."""
    whole = read(form, [text], **options)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[start:end] for start, end in itertools.pairwise(edges)] or [""]
    for other in (parts, list(text) or [""], [*text, ""]):
        *got, split = read(form, other, **options)
        assert got == [*whole[:2]]
        assert (split.ended, split.has_called) == (whole[2].ended, whole[2].has_called)
    return whole


CUTS = st.lists(st.integers(0, 10**6), max_size=8)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(["", "I look.", "a < b"]), st.lists(st.tuples(NAMES, ARGUMENTS)), CUTS)
def test_calls_of_deepseek_are_read_as_they_were_written(before, calls, cuts):
    for form, write, between in ((DEEPSEEK, deepseek, "\n"), (DEEPSEEK_V31, deepseek_v31, "")):
        written = between.join(write(*call) for call in calls)
        text = before + (f"\n\n{CALLS}{written}{END_CALLS}" if calls else "")
        content, got, split = check_any_cut(form, text, cuts)
        assert (content, got) == (before, calls)
        assert split.has_called == bool(calls)


VALUES = st.one_of(
    st.integers(),
    st.text('{}"\\é<>/`\n ', max_size=6),
    st.lists(st.text("<é", max_size=2), max_size=2),
    st.none(),
)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["", "I look.", "a < b"]),
    st.lists(
        st.tuples(
            NAMES,
            st.dictionaries(st.text("ab{é ", min_size=1, max_size=3), VALUES, max_size=3).map(
                lambda values: json.dumps(values, ensure_ascii=False)
            ),
        )
    ),
    CUTS,
)
def test_calls_in_dsml_become_json(before, calls, cuts):
    begin, end = DEEPSEEK_V32.structure
    written = "\n".join(dsml(*call) for call in calls)
    text = before + (f"\n\n{begin}\n{written}\n{end}" if calls else "")
    content, got, split = check_any_cut(DEEPSEEK_V32, text, cuts)
    assert (content, got) == (before, calls)
    assert split.has_called == bool(calls)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(["", "I look.", "a < b"]), st.lists(st.tuples(NAMES, ARGUMENTS)), CUTS)
def test_calls_of_hermes_are_read_as_they_were_written(before, calls, cuts):
    text = "\n".join([before, *(hermes(*call) for call in calls)]) if calls else before
    content, got, split = check_any_cut(HERMES, text, cuts)
    assert (content, got) == (before, calls)
    assert split.has_called == bool(calls)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1), st.sampled_from(["", " ", "\n"]), CUTS)
def test_calls_in_plain_json_are_read_as_they_were_written(calls, space, cuts):
    written = ("," + space).join(
        f'{{{space}"name":{space}"{name}",{space}"arguments":{space}{arguments}{space}}}'
        for name, arguments in calls
    )
    text = f"[{space}{written}{space}]"
    assert check_any_cut(PLAIN_JSON, text, cuts)[:2] == ("", calls)
    name, arguments = calls[0]
    assert check_any_cut(PLAIN_JSON, text, cuts, max_calls=1)[:2] == ("", calls[:1])
    alone = check_any_cut(PLAIN_JSON, arguments, cuts, function=name, max_calls=1)
    assert alone[:2] == ("", calls[:1])
    assert alone[2].ended


PIECES = {
    DEEPSEEK: [DEEPSEEK.begin, DEEPSEEK.end, CALLS, END_CALLS, SEP, "function", "```json", "```"],
    DEEPSEEK_V31: [DEEPSEEK.begin, DEEPSEEK.end, CALLS, END_CALLS, SEP, "name"],
    DEEPSEEK_V32: [
        *(DEEPSEEK_V32.begin, DEEPSEEK_V32.end, *DEEPSEEK_V32.structure, ' name="f">', ' name="'),
        *(dsml_values('{"a": "1"}'), dsml_values('{"b": 1}')[:-2], "</\uff5cDSML\uff5cparameter>"),
        *('<\uff5cDSML\uff5cparameter name="p">', "<\uff5cDSML\uff5cparameter", '"'),
    ],
    HERMES: ["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": ', '"'],
}


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_whatever_a_model_writes_the_cut_does_not_matter_and_no_word_is_lost(data):
    form = data.draw(st.sampled_from([*PIECES]))
    piece = st.sampled_from([*PIECES[form], *PIECES[form], "{", "}", "\n", " ", "<", "WORD"])
    pieces = data.draw(st.lists(piece, max_size=25))
    words = (f"w{number}w" for number in itertools.count())
    text = "".join(next(words) if piece == "WORD" else piece for piece in pieces)
    content, calls, _ = check_any_cut(form, text, data.draw(CUTS))
    shown = content + "".join(f"{name}{arguments}" for name, arguments in calls)
    for number in range(pieces.count("WORD")):
        assert shown.count(f"w{number}w") == text.count(f"w{number}w")


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>{"arguments": {"": 1}, "name": "f"}</tool_call>', "",
         [("f", '{"": 1}')]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, "<tool_call>no</tool_call>.", "<tool_call>no</tool_call>.", []),
        (HERMES, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        (HERMES, hermes("f", "{}") + " and more", "and more", [("f", "{}")]),
        (HERMES, "  ", "  ", []),
        (HERMES, "<tool_cal", "<tool_cal", []),
        (DEEPSEEK, deepseek("f", "no JSON"), deepseek("f", "no JSON"), []),
        (DEEPSEEK, deepseek("f", "{}").removesuffix(DEEPSEEK.end), "", [("f", "{}")]),
        (DEEPSEEK_V31, deepseek("f", "{}"), deepseek("f", "{}"), []),
        (DEEPSEEK_V31, deepseek_v31("f", "no JSON"), deepseek_v31("f", "no JSON"), []),
        (DEEPSEEK_V31, deepseek_v31(" f\n", "\n{}\n"), "", [("f", "{}")]),
        (DEEPSEEK_V31, deepseek_v31("f", "{}") + " and more", "and more", [("f", "{}")]),
        (DEEPSEEK_V32, dsml("f", "{}") + " and more", "and more", [("f", "{}")]),
        (DEEPSEEK_V32, dsml("f", '{"a": 1}').replace("1", "True"), "", [("f", '{"a": "True"}')]),
        (DEEPSEEK_V32, dsml("f", '{"a": 1}').replace(' string="false"', ""), "",
         [("f", '{"a": 1}')]),
        (DEEPSEEK_V32, dsml("f", '{"a": 1}').replace("<\uff5cDSML\uff5cp", "so <\uff5cDSML\uff5cp"),
         "so", [("f", '{"a": 1}')]),
        (DEEPSEEK_V32, dsml("f", "{}").replace("\n\n", ' {"a":\n{}} '), "",
         [("f", '{"a":\n{}}')]),
        (DEEPSEEK_V32, dsml("f", '{"a": "b"}').partition("b<")[0] + "b</", "",
         [("f", '{"a": "b</')]),
        (DEEPSEEK_V32, dsml("f", '{"a": 1}').partition("1<")[0], "", [("f", '{"a": ')]),
        (DEEPSEEK_V32, DEEPSEEK_V32.begin + ">", DEEPSEEK_V32.begin + ">", []),
        (DEEPSEEK, deepseek("f", '{"a": "'), "", [("f", '{"a": "\n```' + DEEPSEEK.end)]),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content(form, text, content, calls):
    assert check_any_cut(form, text, [])[:2] == (content, calls)


@pytest.mark.parametrize(
    ("form", "write"), [(HERMES, hermes), (DEEPSEEK, deepseek), (DEEPSEEK_V31, deepseek_v31)]
)
def test_a_call_has_its_name_first_and_its_arguments_as_they_arrive(form, write):
    split = ToolCallSplit(form)
    parts = [split.read(letter, final=False) for letter in write("f", '{"a": [1]}')]
    assert not any(text for text, _ in parts)
    calls = [call for _, calls in parts for call in calls]
    assert [call.name for call in calls] == ["f", *[None] * 9]
    assert [call.arguments for call in calls] == [*'{"a": [1]}']


def test_text_in_dsml_arrives_as_it_is_written_and_other_values_at_once():
    split = ToolCallSplit(DEEPSEEK_V32)
    written = dsml("f", json.dumps({"a": 'x"y', "b": [1, 2]}))
    parts = [split.read(letter, final=False) for letter in written]
    assert not any(text for text, _ in parts)
    name, *arguments = [call for _, calls in parts for call in calls]
    assert (name.name, name.arguments) == ("f", "")
    assert [call.arguments for call in arguments] == [
        *('{"a": "', "x", '\\"', "y", '"', ', "b": ', "[1, 2]", "}")
    ]


def test_content_within_a_call_follows_it():
    split = ToolCallSplit(DEEPSEEK_V32)
    written = dsml("f", '{"a": 1}').replace("\n<", " or<")
    before = [split.read(letter, final=False)[0] for letter in written.removesuffix(">")]
    assert not any(before)
    text, (call,) = split.read(">", final=False)
    assert (text, call.arguments, split.has_called) == ("or or", "}", True)


def test_an_incomplete_call_is_no_call_to_act_on():
    assert not read(HERMES, ['<tool_call>{"name": "f", "arguments": {"a"'])[2].has_called
    assert not read(PLAIN_JSON, [""], function="f", max_calls=1)[2].has_called

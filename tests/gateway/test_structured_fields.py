"""What the output must match, in OpenAI's form and in vLLM's two, reaches the ranks or is named."""

import json

import grpc
import pytest

from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.fields import Fields
from equipoise.gateway.structured_fields import grammar_of
from equipoise.wire.inference_messages import Blame, Grammar, GrammarKind
from tests.support.scripted_ranks import Fault, all_events

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
OF_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')
OF_REGEX = Grammar(kind=GrammarKind.REGEX, text="a+")
OF_CHOICE = Grammar(kind=GrammarKind.REGEX, text=r"a\x2eb|é\x0a")
OF_LARK = Grammar(kind=GrammarKind.GRAMMAR, text='start: "a"')


def named(**fields):
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, **fields}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OF_OBJECT),
        ({"response_format": named(schema=SCHEMA)}, OF_SCHEMA),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, OF_REGEX),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"guided_choice": ["a.b", "é\n"]}, OF_CHOICE),
        ({"guided_grammar": 'start: "a"'}, OF_LARK),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "a+", "json": None}}, OF_REGEX),
        ({"structured_outputs": {"choice": ["a.b", "é\n"]}}, OF_CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, OF_LARK),
        ({"structured_outputs": {"json_object": True}}, OF_OBJECT),
    ],
)
def test_all_forms_say_what_the_output_must_match(fields, grammar):
    assert grammar_of(Fields(fields)) == grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", 'not "xml"'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": named()}, "response_format.json_schema.schema", "a JSON schema"),
        ({"response_format": named(schema=7)}, "response_format.json_schema.schema", "schema"),
        ({"response_format": named(more=1)}, "response_format.json_schema.more", "unknown"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": True}, "guided_json", "must be a JSON schema"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_regex": "\ud800"}, "guided_regex", "unpaired surrogate"),
        ({"guided_regex": "a" * 2**16 + "a"}, "guided_regex", "at most 65536 bytes"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024 strings"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "1 to 1024 strings"),
        ({"guided_grammar": 7}, "guided_grammar", "must be a string"),
        ({"guided_grammar": "a", "guided_regex": "a"}, "guided_regex", "send one"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "one"),
        (
            {"structured_outputs": {"whitespace_pattern": "a"}},
            "structured_outputs.white",
            "unknown",
        ),
    ],
)
def test_what_is_invalid_is_named(fields, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        grammar_of(Fields(fields))
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"), [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 1}, "min_tokens")]
)
async def test_an_output_must_be_able_to_end_where_its_grammar_ends(gateway, fields, param):
    response = await gateway.post(prompt="a", guided_regex="a+", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_grammar_that_gets_too_complex_is_the_clients_fault(gateway, fleet):
    too_complex = Fault(after=2, code=grpc.StatusCode.OUT_OF_RANGE, blame=Blame.REQUEST)
    fleet.fail(too_complex)
    response = await gateway.post(prompt="abc", max_tokens=4, guided_regex="a+")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "grammar_too_complex"
    async with gateway.stream(prompt="abc", max_tokens=4, guided_regex="a+") as stream:
        *_, last = await all_events(stream)
    assert json.loads(last)["error"]["code"] == "grammar_too_complex"
    assert fleet.num_requests == 2
    # No rank counts as failed.
    assert (await gateway.post(prompt="abc", max_tokens=4)).status_code == 200


async def test_a_retry_has_the_same_grammar(gateway, fleet):
    fleet.fail(Fault(after=1))
    response = await gateway.post(prompt="abc", max_tokens=4, guided_json=SCHEMA, n=2)
    assert response.status_code == 200, response.text
    requests = [request for rank in fleet.ranks for request in rank.requests]
    assert {request.grammar.json_schema for request in requests} == {json.dumps(SCHEMA)}
    assert max(request.num_replayed for request in requests) >= 1

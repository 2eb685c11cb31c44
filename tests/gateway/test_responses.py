"""`/v1/responses` as OpenAI's client sees it: whole, streamed, and sent back as input."""

import json
from contextlib import asynccontextmanager

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from equipoise_api.v1 import worker_pb2 as pb
from tests.gateway.test_tool_calls import dsml, hermes
from tests.support.scripted_ranks import BOUND_S, TRUSTING_NOBODY, Fault, says, undisturbed

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SHOWN = json.dumps(
    {"type": "function", "function": {key: WEATHER[key] for key in WEATHER if key != "type"}}
)
ROME = '{"city": "Rome"}'
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}


@asynccontextmanager
async def clients(run_gateway, fleet, **settings):
    async with (
        run_gateway(
            workers=tuple(fleet.addresses),
            context_length=4096,
            reasoning_parser="deepseek_r1",
            **settings,
        ) as gateway,
        openai.AsyncOpenAI(
            base_url=f"{gateway.client.base_url}/v1",
            api_key="any",
            max_retries=0,
            timeout=BOUND_S,
            http_client=openai.DefaultAsyncHttpxClient(verify=TRUSTING_NOBODY),
        ) as client,
    ):
        yield client


@pytest_asyncio.fixture
async def client(run_gateway, fleet):
    async with clients(run_gateway, fleet, tool_call_parser="hermes") as client:
        yield client


@pytest.fixture
def prompts(fleet):
    """A function that returns what the ranks were asked since the last call."""

    def take():
        prompts = [bytes(one.prompt).decode() for rank in fleet.ranks for one in rank.requests]
        for rank in fleet.ranks:
            rank.requests.clear()
            rank.faults.clear()
        return prompts

    return take


def check(response):
    """The response has all that OpenAI's type requires, but for what is written to caches."""
    document = response.model_dump(mode="json", exclude_unset=True)
    document["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
    Response.model_validate(document)


async def test_a_response_has_openais_form(client, fleet, prompts):
    fleet.fail(says("I see.</think>\n\nhello"))
    response = await client.responses.create(
        model="tiny",
        instructions="be brief",
        input="hi",
        temperature=0.5,
        max_output_tokens=99,
        metadata={"a": "b"},
        store=False,
    )
    check(response)
    assert prompts() == ["[system]be brief[user]hi"]
    assert response.output_text == "hello"
    assert response.id.startswith("resp_")
    assert (response.status, response.incomplete_details, response.store) == (
        "completed",
        None,
        False,
    )
    assert (response.instructions, response.temperature) == ("be brief", 0.5)
    assert (response.max_output_tokens, response.metadata) == (99, {"a": "b"})
    reasoning, message = response.output
    assert reasoning.content[0].text == "I see."
    assert message.status == "completed"
    usage = response.usage
    assert usage.input_tokens == len("[system]be brief[user]hi")
    assert usage.output_tokens == len("I see.</think>\n\nhello") + 1
    assert usage.output_tokens_details.reasoning_tokens == len("I see.</think>\n\n")


async def test_what_max_output_tokens_ends_is_incomplete(client, fleet):
    response = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    check(response)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    (reasoning,) = response.output
    assert reasoning.content[0].text == bytes(undisturbed(tuple(b"[user]hi"), 3)).decode()
    assert reasoning.status == "incomplete"


CALLING = f"why</think>I look.\n{hermes('weather', ROME)}\n{hermes('weather', '{}')}"


async def test_calls_are_answered_and_the_conversation_continues(client, fleet, prompts):
    fleet.fail(says(CALLING))
    asked = {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}
    response = await client.responses.create(model="tiny", input=[asked], tools=[WEATHER])
    check(response)
    assert prompts() == [f"{SHOWN}[user]Rome?"]
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    calls = response.output[2:]
    assert [(call.name, call.arguments) for call in calls] == [("weather", ROME), ("weather", "{}")]
    assert len({call.call_id for call in calls}) == 2
    fleet.fail(says("ok</think>rain"))
    again = await client.responses.create(
        model="tiny",
        input=[
            asked,
            *response.output,
            *(
                {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
                for call in calls
            ),
        ],
        tools=[WEATHER],
    )
    assert again.output_text == "rain"
    (prompt,) = prompts()
    calls = f"(weather{ROME}:{ROME})(weather{{}}:{{}})"
    assert prompt == f"{SHOWN}[user]Rome?[assistant]I look.{calls}[tool]rain[tool]rain"


async def test_the_events_of_a_stream_come_in_openais_order(client, fleet):
    fleet.fail(says(CALLING))
    stream = await client.responses.create(model="tiny", input="a", tools=[WEATHER], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events[:-1]:
        EVENT.validate_python(event.model_dump(mode="json", exclude_unset=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    whole = events[-1].response
    check(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == whole.output
    for at, item in enumerate(whole.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == at]
        text = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        wanted = item.arguments if item.type == "function_call" else item.content[0].text
        assert text == wanted
        ids = {getattr(event, "item_id", item.id) for event in of_item}
        assert ids == {item.id}


@pytest.mark.parametrize("stream", [False, True])
async def test_text_within_a_call_follows_it(run_gateway, fleet, stream):
    arguments = '{"city": "Rome", "days": 2}'
    call = dsml("weather", arguments).replace("\n<", " or<")
    fleet.fail(says(f"why</think>{call}"))
    async with clients(run_gateway, fleet, tool_call_parser="deepseek_v32") as client:
        answer = await client.responses.create(
            model="tiny", input="a", tools=[WEATHER], stream=stream
        )
        whole = [event async for event in answer][-1].response if stream else answer
    _, call, message = whole.output
    assert (call.name, call.arguments, call.status) == ("weather", arguments, "completed")
    assert message.content[0].text == "or or or"


async def test_openais_stream_helper_adds_up(client, fleet):
    fleet.fail(says(CALLING))
    async with client.responses.stream(model="tiny", input="a", tools=[WEATHER]) as stream:
        texts = [
            event.delta async for event in stream if event.type == "response.output_text.delta"
        ]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == "I look."
    assert [item.arguments for item in final.output if item.type == "function_call"] == [ROME, "{}"]


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ({"type": "text"}, None, ""),
        ({"type": "json_object"}, "json_schema", '{"type": "object"}'),
        (
            {"type": "json_schema", "name": "it", "strict": True, "schema": SCHEMA},
            "json_schema",
            json.dumps(SCHEMA),
        ),
    ],
)
async def test_the_format_of_text_is_a_grammar(client, fleet, form, kind, text):
    fleet.fail(says('</think>{"ok": true}'))
    response = await client.responses.create(
        model="tiny", input="a", text={"format": form}, max_output_tokens=50
    )
    assert response.output_text == '{"ok": true}'
    assert response.text.format.type == form["type"]
    (request,) = [request for rank in fleet.ranks for request in rank.requests]
    assert request.grammar.WhichOneof("kind") == kind
    assert request.grammar.json_schema == text
    assert request.grammar.after == ("</think>" if kind else "")


async def test_a_function_may_be_required(client, fleet):
    fleet.fail(says(f"</think>{ROME}"))
    response = await client.responses.create(
        model="tiny",
        input="a",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
    )
    (call,) = response.output
    assert (call.name, call.arguments, call.status) == ("weather", ROME, "completed")
    assert response.tool_choice.name == "weather"


async def test_a_stream_that_fails_ends_with_an_error_event(client, fleet):
    for _ in range(4):
        fleet.fail(Fault(also=(pb.GenerateResponse(tokens=[97]),)))
    stream = await client.responses.create(model="tiny", input="a", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "error"
    assert events[-1].code == "attempts_exhausted"
    assert events[-1].sequence_number == len(events) - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"instructions": ["a"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "c"}]}, "input[0].call_id"),
        ({"input": "forbidden"}, "input"),
        ({"text": "a"}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
async def test_what_is_not_supported_is_named(client, fleet, fields, param):
    body = {"model": "tiny", "input": "a", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/responses", body=body, cast_to=object)
    assert caught.value.param == param
    assert fleet.num_requests == 0


async def test_what_is_not_supported_says_what_to_do_instead(client):
    body = {"model": "tiny", "input": "a", "previous_response_id": "resp_1"}
    with pytest.raises(openai.BadRequestError, match="send the earlier output as part of input"):
        await client.post("/responses", body=body, cast_to=object)

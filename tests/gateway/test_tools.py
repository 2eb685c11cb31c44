"""Tools in chats: from the request to the template and back, as OpenAI's client sees it."""

import json
from contextlib import asynccontextmanager

import openai
import pytest
import pytest_asyncio

from equipoise.gateway.tool_formats import FORMATS, ToolCallParser
from equipoise_api.v1 import worker_pb2 as pb
from tests.gateway.test_tool_calls import deepseek, deepseek_v31, dsml, hermes
from tests.support.scripted_ranks import BOUND_S, TRUSTING_NOBODY, Fault, says

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
ASKED = [{"role": "user", "content": "how is it in Rome?"}]
ROME, OSLO = '{"city": "Rome"}', '{"city":"Oslo"}'
CALLS, END_CALLS = FORMATS[ToolCallParser.DEEPSEEK_V3].structure
IN_DEEPSEEKS_FORM = (
    f"I look.\n\n{CALLS}{deepseek('weather', ROME)}\n{deepseek('weather', OSLO)}{END_CALLS}"
)
IN_DEEPSEEK_V31S_FORM = (
    f"I look.\n\n{CALLS}{deepseek_v31('weather', ROME)}{deepseek_v31('weather', OSLO)}{END_CALLS}"
)
BEGIN_DSML, END_DSML = FORMATS[ToolCallParser.DEEPSEEK_V32].structure
IN_DSML = f"I look.\n\n{BEGIN_DSML}\n{dsml('weather', ROME)}\n{dsml('weather', OSLO)}\n{END_DSML}"
IN_HERMES_FORM = f"I look.\n{hermes('weather', ROME)}\n{hermes('weather', OSLO)}"


@pytest_asyncio.fixture(params=["deepseek_v3", "deepseek_v31", "hermes"])
async def model(request, run_gateway, fleet):
    """OpenAI's client, and what the model says to call the tool twice."""
    written = {
        "deepseek_v3": IN_DEEPSEEKS_FORM,
        "deepseek_v31": IN_DEEPSEEK_V31S_FORM,
        "hermes": IN_HERMES_FORM,
    }[request.param]
    async with clients(run_gateway, fleet, tool_call_parser=request.param) as client:
        yield client, written


@asynccontextmanager
async def clients(run_gateway, fleet, **settings):
    async with (
        run_gateway(workers=tuple(fleet.addresses), context_length=4096, **settings) as gateway,
        openai.AsyncOpenAI(
            base_url=f"{gateway.client.base_url}/v1",
            api_key="any",
            max_retries=0,
            timeout=BOUND_S,
            http_client=openai.DefaultAsyncHttpxClient(verify=TRUSTING_NOBODY),
        ) as client,
    ):
        yield client


async def ask(client, **fields):
    fields = {"model": "tiny", "messages": ASKED, "tools": [WEATHER, TIME], **fields}
    return await client.chat.completions.create(**fields)


async def streamed(client, **fields):
    """A stream's accumulated choices by index: content, calls, finish reason; and its deltas."""
    choices, deltas = {}, []
    async for chunk in await ask(client, stream=True, **fields):
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"content": "", "calls": {}, "finish": None})
            choice["content"] += part.delta.content or ""
            choice["finish"] = part.finish_reason or choice["finish"]
            for call in part.delta.tool_calls or ():
                deltas.append(call)
                if call.id is not None:
                    assert call.type == "function"
                    choice["calls"][call.index] = [call.id, call.function.name, ""]
                choice["calls"][call.index][2] += call.function.arguments
    return choices, deltas


async def test_calls_are_answered_and_the_conversation_continues(model, fleet):
    client, written = model
    fleet.fail(says(written))
    (choice,) = (await ask(client)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 2
    assert [call.function.arguments for call in calls] == [ROME, OSLO]
    assert len({call.id for call in calls}) == 2
    messages = [
        *ASKED,
        choice.message,
        *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls),
    ]
    for rank in fleet.ranks:
        rank.faults.clear()
        rank.requests.clear()
    fleet.fail(says("It rains."))
    (choice,) = (await ask(client, messages=messages)).choices
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
    assert choice.message.tool_calls is None
    (request,) = [request for rank in fleet.ranks for request in rank.requests]
    tools = json.dumps(WEATHER) + json.dumps({"type": "function", "function": {"name": "time"}})
    assert bytes(request.prompt).decode() == (
        f"{tools}[user]how is it in Rome?[assistant]I look."
        f'(weather{ROME}:{ROME})(weather{{"city": "Oslo"}}:{OSLO})[tool]rain[tool]rain'
    )


async def test_a_stream_has_each_calls_id_and_name_first(model, fleet):
    client, written = model
    fleet.fail(says(written))
    choices, deltas = await streamed(client)
    assert choices[0]["content"] == "I look."
    assert choices[0]["finish"] == "tool_calls"
    calls = choices[0]["calls"]
    assert [call[1:] for call in calls.values()] == [["weather", ROME], ["weather", OSLO]]
    assert len({call[0] for call in calls.values()}) == 2
    # Every byte of the arguments is sent as it comes.
    assert [one.function.arguments for one in deltas if one.index == 1] == [*OSLO]
    assert [one.id is not None for one in deltas if one.index == 1] == [
        at == 0 for at in range(len(OSLO))
    ]


async def test_calls_in_dsml_become_json(run_gateway, fleet):
    async with clients(run_gateway, fleet, tool_call_parser="deepseek_v32") as client:
        fleet.fail(says(IN_DSML), says(IN_DSML))
        (choice,) = (await ask(client)).choices
        choices, _ = await streamed(client)
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    wanted = [("weather", ROME), ("weather", '{"city": "Oslo"}')]
    calls = [call.function for call in choice.message.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == wanted
    assert (choices[0]["content"], choices[0]["finish"]) == ("I look.", "tool_calls")
    assert [tuple(call[1:]) for call in choices[0]["calls"].values()] == wanted


async def test_a_call_ends_the_answer_unless_calls_may_be_parallel(model, fleet):
    client, written = model
    fleet.fail(says(written), says(written))
    answer = await ask(client, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == ROME
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens < len(written.encode())
    choices, _ = await streamed(client, parallel_tool_calls=False)
    assert [call[2] for call in choices[0]["calls"].values()] == [ROME]
    assert choices[0]["finish"] == "tool_calls"
    await fleet.until_idle()


async def test_choices_have_calls_of_their_own(model, fleet):
    client, written = model
    fleet.fail(says(written), says(written))
    choices, _ = await streamed(client, n=2)
    assert sorted(choices) == [0, 1]
    ids = {call[0] for choice in choices.values() for call in choice["calls"].values()}
    assert len(ids) == 4


async def test_logprobs_are_of_all_tokens_and_stop_strings_of_all_text(model, fleet):
    client, written = model
    fleet.fail(Fault(also=tuple(with_logprob(message) for message in says(written).also)))
    (choice,) = (await ask(client, logprobs=True)).choices
    assert bytes(byte for one in choice.logprobs.content for byte in one.bytes) == written.encode()
    assert len(choice.message.tool_calls) == 2
    for rank in fleet.ranks:
        rank.faults.clear()
    fleet.fail(says(written))
    (choice,) = (await ask(client, stop=['": "Rom'])).choices
    (call,) = choice.message.tool_calls
    assert call.function.arguments == '{"city'
    assert choice.finish_reason == "stop", "the call is not complete"


def with_logprob(message):
    logprobs = [pb.TokenLogprob(logprob=-1) for _ in message.tokens]
    return pb.GenerateResponse(
        tokens=message.tokens, finish_reason=message.finish_reason, logprobs=logprobs
    )


async def test_reasoning_comes_before_calls_and_has_none(run_gateway, fleet):
    async with clients(
        run_gateway, fleet, tool_call_parser="hermes", reasoning_parser="deepseek_r1"
    ) as client:
        thought = f"I could {hermes('time', '{}')}"
        fleet.fail(says(f"<think>{thought}</think>\n{IN_HERMES_FORM}"))
        (choice,) = (await ask(client)).choices
    assert choice.message.reasoning_content == thought
    assert choice.message.content == "I look."
    assert [call.function.arguments for call in choice.message.tool_calls] == [ROME, OSLO]


async def test_a_truncated_call_ends_with_length(model, fleet):
    client, written = model
    num_tokens = len(written[: written.index("Rome")].encode())
    *messages, last = says(written).also[:num_tokens]
    end = pb.GenerateResponse(tokens=last.tokens, finish_reason=pb.FINISH_REASON_LENGTH)
    fleet.fail(Fault(also=(*messages, end)))
    (choice,) = (await ask(client, max_tokens=num_tokens)).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.arguments == '{"city": "'


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_must_be_made_is_a_grammar(run_gateway, fleet, choice, stream):
    """It needs no parser."""
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {"tool_choice": named if choice == "named" else choice, "max_tokens": 99}
    text = ROME if choice == "named" else f'[{{"name": "weather", "arguments": {ROME}}}]'
    fleet.fail(says(text))
    async with clients(run_gateway, fleet) as client:
        if stream:
            choices, _ = await streamed(client, **fields)
            ((_, *call),) = choices[0]["calls"].values()
            assert (choices[0]["content"], choices[0]["finish"]) == ("", "tool_calls")
        else:
            (one,) = (await ask(client, **fields)).choices
            (made,) = one.message.tool_calls
            call = [made.function.name, made.function.arguments]
            assert (one.message.content, one.finish_reason) == (None, "tool_calls")
    assert call == ["weather", ROME]
    (request,) = [request for rank in fleet.ranks for request in rank.requests]
    schema = json.loads(request.grammar.json_schema)
    if choice == "named":
        assert schema == WEATHER["function"]["parameters"]
    else:
        assert list(schema["$defs"]) == ["weather", "time"]
        moved = schema["$defs"]["weather"]["properties"]["city"]["$ref"]
        assert moved == "#/$defs/weather/$defs/City"


async def test_none_shows_no_tools_and_reads_no_calls(gateway, fleet):
    fleet.fail(says(IN_HERMES_FORM))
    body = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 200}
    response = await gateway.client.post("/v1/chat/completions", json=body)
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == IN_HERMES_FORM
    (request,) = [request for rank in fleet.ranks for request in rank.requests]
    assert b"weather" not in bytes(request.prompt)


def function(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        (function(name="a b"), "tools[0].function.name"),
        (function(description=1), "tools[0].function.description"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={"type": "array"}), "tools[0].function.parameters"),
        (function(strict=1), "tools[0].function.strict"),
        (function(more=1), "tools[0].function.more"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [WEATHER], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
async def test_what_is_invalid_is_named(run_gateway, fleet, fields, param):
    async with clients(run_gateway, fleet, tool_call_parser="hermes") as client:
        body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 9, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param
    assert fleet.num_requests == 0


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "tool_calls"),
        ({"tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [1]}, "tool_calls[0]"),
        ({"tool_calls": [{"type": "function"}]}, "tool_calls[0].type"),
        ({"function": {"name": 1, "arguments": "{}"}}, "tool_calls[0].function.name"),
        ({"function": {"name": "f", "arguments": "{"}}, "tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": "[]"}}, "tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": {}}}, "tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": "{}"}}, "tool_calls[0].id"),
        ({"role": "tool", "tool_call_id": 7, "content": "a"}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "c", "content": {}}, "content"),
    ],
)
async def test_what_is_invalid_in_a_message_is_named(gateway, message, param):
    if "function" in message:
        message = {"tool_calls": [{"type": "function", **message}]}
    body = {"messages": [*ASKED, {"role": "assistant", **message}], "max_tokens": 9}
    response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == f"messages[1].{param}"


async def test_without_a_parser_the_model_cannot_choose_to_call(gateway):
    body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 9}
    response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.json()["error"]["param"] == "tools"
    assert (
        "--tool-call-parser (deepseek_v3 or deepseek_v31 or deepseek_v32 or hermes)"
        in response.json()["error"]["message"]
    )


async def test_a_template_that_shows_no_tools_is_named(run_gateway, fleet, checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    async with clients(run_gateway, fleet, tool_call_parser="hermes") as client:
        with pytest.raises(openai.BadRequestError, match="does not show tools"):
            await ask(client, max_tokens=9)

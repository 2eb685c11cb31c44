"""What clients compute from a real engine's answers."""

import asyncio
import json
import shutil
import statistics

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from tests.support.live_rank import BOUND_S, live_rank

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXTS = ("def f(", "class A:\n", "12 + ")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory):
    """OpenAI's client of a gateway in front of a live rank; the template has room for tools."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    shutil.copy(packaged_checkpoint() / "config.json", checkpoint)
    (checkpoint / "chat_template.jinja").write_text("{{ messages[-1].content }}{% set _ = tools %}")
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with live_rank(context_length=512) as address:
        settings = GatewaySettings(
            listen="127.0.0.1:0", workers=(address,), checkpoint=checkpoint, model="tiny"
        )
        task = asyncio.create_task(serve(settings, stop=stop, listening=listening.set_result))
        base_url = f"http://{await asyncio.wait_for(listening, BOUND_S)}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            yield client
        stop.set()
        await asyncio.wait_for(task, BOUND_S)


async def test_loglikelihoods_as_lm_eval_computes_them(client):
    """Its local-completions model: the prompt's logprobs without the one generated token."""
    fields = {"model": "tiny", "temperature": 0, "logprobs": 1}
    made = await client.completions.create(prompt=list(CONTEXTS), max_tokens=8, **fields)
    texts = [choice.text for choice in made.choices]
    pairs = zip(CONTEXTS, texts, strict=True)
    wholes = [[*context.encode(), *text.encode()] for context, text in pairs]
    scored = await client.completions.create(prompt=wholes, max_tokens=1, echo=True, **fields)
    for context, text, generated, choice in zip(
        CONTEXTS, texts, made.choices, scored.choices, strict=True
    ):
        values = choice.logprobs.token_logprobs[len(context) : -1]
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        assert len(values) == len(text)
        assert values == pytest.approx(generated.logprobs.token_logprobs, abs=1e-5)
        assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    other = [*CONTEXTS[0].encode(), *b"\x01\x02"]
    (choice,) = (
        await client.completions.create(prompt=other, max_tokens=1, echo=True, **fields)
    ).choices
    assert sum(choice.logprobs.token_logprobs[-3:-1]) < -5


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_the_best_choices_are_those_of_the_highest_mean_logprob(client, logprobs):
    fields = {"model": "tiny", "prompt": list(CONTEXTS), "max_tokens": 12, "temperature": 1.5}
    fields |= {"seed": 5, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    made = await client.completions.create(n=6, logprobs=0, **fields)
    best = await client.completions.create(n=2, best_of=6, logprobs=logprobs, **fields)
    assert [choice.index for choice in best.choices] == [*range(6)]
    assert best.usage.completion_tokens == 18 * 12, "all that was generated counts"
    for prompt in range(3):
        ranked = sorted(
            made.choices[6 * prompt : 6 * prompt + 6],
            key=lambda one: -statistics.mean(one.logprobs.token_logprobs),
        )
        found = best.choices[2 * prompt : 2 * prompt + 2]
        assert [one.token_ids for one in found] == [one.token_ids for one in ranked[:2]]
        assert all((one.logprobs is None) == (logprobs is None) for one in found)


class Answer(BaseModel):
    ok: bool
    size: int


# The client declares a message's `parsed` to be null.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_openais_client_parses_what_the_schema_promises_and_sends_it_back(client):
    asked = [{"role": "user", "content": "x = "}]
    for seed in range(4):
        answer = await client.chat.completions.parse(
            model="tiny", messages=asked, response_format=Answer, temperature=1, seed=seed
        )
        message = answer.choices[0].message
        assert isinstance(message.parsed, Answer)
        await client.chat.completions.create(
            model="tiny", messages=[*asked, message, *asked], max_tokens=1
        )


async def test_openais_client_parses_a_call_and_sends_it_back(client):
    asked = [{"role": "user", "content": "x = "}]
    answer = await client.chat.completions.parse(
        model="tiny",
        messages=asked,
        tools=[openai.pydantic_function_tool(Answer)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Answer)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    await client.chat.completions.create(
        model="tiny", messages=[*asked, message, result], max_tokens=1
    )


WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}


@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_call_that_must_be_made_is_made_and_matches_its_parameters(client, choice):
    for seed in range(4):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x = "}],
            tools=[
                {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
                {"type": "function", "function": {"name": "time"}},
            ],
            tool_choice="required"
            if choice == "required"
            else {"type": "function", "function": {"name": "weather"}},
            parallel_tool_calls=False,
            max_tokens=450,
            seed=seed,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "time":
            assert choice == "required"
            assert arguments == {}
        else:
            assert sorted(arguments) == ["city", "sunny"]
            assert arguments["city"] in ("Rome", "Oslo")
            assert isinstance(arguments["sunny"], bool)


DEEP = "\n".join(("start: r0", *(f"r{n}: r{n + 1}" for n in range(3500)), 'r3500: "a"'))
"""It overflows a usual stack."""

ENDLESS = {"type": "integer", "multipleOf": 1_000_003}
"""It had not compiled after 40 s."""


async def test_grammars_that_crash_or_never_end_cost_other_requests_nothing(client):
    async def ask(**fields):
        return await client.completions.create(
            model="tiny", prompt="def f(", max_tokens=4, temperature=0, extra_body=fields
        )

    usual = (await ask()).choices[0].text
    endless = [asyncio.create_task(ask(guided_json=ENDLESS, seed=seed)) for seed in range(2)]
    while not all(task.done() for task in endless):
        assert (await ask()).choices[0].text == usual
    for task in endless:
        with pytest.raises(openai.BadRequestError, match="too complex"):
            await task
    assert (await ask(guided_grammar=DEEP)).choices[0].text == "a"

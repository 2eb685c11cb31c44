"""OpenAI's own client works over real HTTP."""

import asyncio

import openai
import pytest
import pytest_asyncio

from equipoise_api.v1 import worker_pb2 as pb
from tests.support.scripted_ranks import BOUND_S, TRUSTING_NOBODY, Fault, undisturbed

PROMPT = "def balance("


def text_of(prompt, max_tokens):
    return bytes(undisturbed(tuple(prompt.encode()), max_tokens)).decode()


def text_part(text):
    return {"type": "text", "text": text}


@pytest_asyncio.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.client.base_url}/v1",
        api_key="any",
        max_retries=0,
        timeout=BOUND_S,
        http_client=openai.DefaultAsyncHttpxClient(verify=TRUSTING_NOBODY),
    ) as client:
        yield client


async def test_models_are_listed_and_found(client):
    assert [model.id async for model in client.models.list()] == ["tiny"]
    model = await client.models.retrieve("tiny")
    assert model.owned_by == "equipoise"
    assert model.max_model_len in (None, 256), "None until a rank has reported it"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


async def test_a_completion_has_text_usage_and_probabilities(client):
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, logprobs=2, echo=False
    )
    (choice,) = answer.choices
    assert choice.text == text_of(PROMPT, 5)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 5)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs == [-ord(letter) / 64 for letter in choice.text]
    for letter, top in zip(choice.text, choice.logprobs.top_logprobs, strict=True):
        assert top == {letter: -ord(letter) / 64, chr(ord(letter) + 1): -ord(letter) / 64 - 1}


async def test_echo_repeats_the_prompt(client):
    answer = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, echo=True)
    assert answer.choices[0].text == PROMPT + text_of(PROMPT, 3)
    stream = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, echo=True, stream=True
    )
    assert "".join([part.choices[0].text async for part in stream]) == answer.choices[0].text


async def test_a_chat_is_rendered_and_answered(client, fleet):
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [text_part("def "), text_part("f(")]},
        ],
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=1,
    )
    (choice,) = answer.choices
    rendered = "[system]be brief[user]def f("
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(rendered, 4)
    assert [bytes(one.bytes).decode() for one in choice.logprobs.content] == list(
        choice.message.content
    )
    assert [one.top_logprobs[0].token for one in choice.logprobs.content] == list(
        choice.message.content
    )
    assert answer.usage.prompt_tokens == len(rendered)


async def test_a_streamed_chat_adds_up_to_the_whole(client):
    messages = [{"role": "user", "content": "hello"}]
    stream = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    *parts, last = [part async for part in stream]
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == text_of("[user]hello", 6)
    tokens = [one.token for part in parts[1:] for one in part.choices[0].logprobs.content]
    assert "".join(tokens) == text
    assert parts[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 6
    assert {part.id for part in [*parts, last]} == {last.id}


async def test_a_chat_without_max_tokens_may_fill_the_context(client, fleet):
    await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x" * 240}]
    )
    (request,) = [request for rank in fleet.ranks for request in rank.requests]
    assert request.max_tokens == 256 - len("[user]") - 240


async def test_choices_have_indices_and_seeds_of_their_own(client, fleet):
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        n=3,
        seed=2**64 - 1,
        temperature=0.7,
        max_tokens=5,
        stream=True,
    )
    texts = ["", "", ""]
    async for part in stream:
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [text_of("[user]hi", 5)] * 3
    asked = [request for rank in fleet.ranks for request in rank.requests]
    assert sorted(request.sampling.seed for request in asked) == [0, 1, 2**64 - 1]
    assert {request.sampling.temperature for request in asked} == {0.7}
    whole = await client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=3)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 6


async def test_sampling_reaches_the_ranks_and_continues_after_a_break(client, fleet):
    fleet.ranks[0].faults.append(Fault(after=2))
    fleet.ranks[1].faults.append(Fault(after=2))
    answer = await client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=7,
        extra_body={"top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5},
    )
    assert answer.choices[0].text == text_of(PROMPT, 5)
    asked = [request for rank in fleet.ranks for request in rank.requests]
    assert sorted(request.num_replayed for request in asked) == [0, 2, 4]
    for request in asked:
        assert request.sampling == pb.Sampling(
            temperature=0.5, top_p=0.9, top_k=40, min_p=0.125, repetition_penalty=1.5,
            presence_penalty=0.25, frequency_penalty=-0.5, seed=7,
        )  # fmt: skip
        assert len(request.prompt) == 12 + request.num_replayed


async def test_each_request_without_a_seed_gets_its_own(client, fleet):
    for _ in range(2):
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    asked = [request for rank in fleet.ranks for request in rank.requests]
    assert asked[0].sampling.seed != asked[1].sampling.seed
    assert asked[0].sampling.temperature == 1


async def test_a_stop_string_removes_the_logprobs_of_the_text_it_cuts(client):
    text = text_of(PROMPT, 30)
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, stop=[text[5:8]], logprobs=0
    )
    (choice,) = answer.choices
    cut = text.index(text[5:8])
    assert choice.text == text[:cut]
    assert "".join(choice.logprobs.tokens) == text[:cut]
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == cut + 3


async def test_a_stream_that_is_closed_frees_the_rank(client, fleet):
    fleet.fail(Fault(after=3, hang=True))
    stream = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=99, n=2, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await fleet.until_idle()


async def test_a_conversation_continues_with_the_answer_as_it_came(client, fleet):
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        messages.append(answer.choices[0].message)
    messages.append(answer.choices[0].message.model_dump())
    messages.append({"role": "assistant", "content": "a", "tool_calls": [], "annotations": []})
    notes = {"provider_specific_fields": {"refusal": None}}
    messages.append({"role": "assistant", "content": "a", **notes})
    await client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert fleet.num_requests == 3


async def test_a_field_that_is_null_counts_as_missing(client):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prediction": None}
    await client.post("/chat/completions", body=body, cast_to=object)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            {"continue_final_message": True, "messages": [{"role": "user", "content": "changed"}]},
            "continue_final_message",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": "a", "id": 1}]}, "messages[0].id"),
        ({"messages": [{"role": "user", "content": "a", "name": 3}]}, "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]},
            "messages[0].refusal",
        ),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages"),
        ({"prompt": "a"}, "prompt"),
    ],
)
async def test_an_invalid_chat_names_the_field(client, fleet, fields, param):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param
    assert fleet.num_requests == 0


async def test_an_error_within_a_stream_reaches_the_client(run_gateway, fleet):
    fleet.fail(*[Fault(after=1)] * 9)
    async with (
        run_gateway(workers=tuple(fleet.addresses), max_attempts=2) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.client.base_url}/v1", api_key="any") as client,
    ):
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=9, stream=True
        )
        with pytest.raises(openai.APIError, match="2 attempts failed"):
            await asyncio.wait_for(_drained(stream), BOUND_S)


async def _drained(stream):
    return [part async for part in stream]


async def test_requests_beyond_the_limit_get_429_with_retry_after(run_gateway, fleet):
    fleet.fail(Fault(after=1, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), max_open_requests=1) as gateway:
        async with gateway.stream(prompt=PROMPT) as first:
            assert first.status_code == 200
            second = await gateway.post(prompt=PROMPT)
            assert second.status_code == 429
            assert second.headers["retry-after"] == "1"
            assert second.json()["error"]["code"] == "too_many_requests"
        await fleet.until_idle()


async def test_only_valid_keys_are_served_and_the_key_file_is_reloaded(
    run_gateway, fleet, tmp_path
):
    keys = tmp_path / "keys"
    keys.write_text("# the first team\nsk-first\n\nsk-second\n")
    async with run_gateway(workers=tuple(fleet.addresses), api_keys=keys) as gateway:

        async def served(key):
            async with openai.AsyncOpenAI(
                base_url=f"{gateway.client.base_url}/v1", api_key=key, max_retries=0
            ) as client:
                try:
                    await client.models.list()
                    await client.completions.create(model="tiny", prompt="a", max_tokens=1)
                except openai.AuthenticationError:
                    return False
                return True

        assert [await served(key) for key in ("sk-first", "sk-second", "sk-third")] == [
            True,
            True,
            False,
        ]
        keyless = await gateway.post(prompt="a")
        assert keyless.status_code == 401
        assert keyless.json()["error"]["code"] == "invalid_api_key"
        assert keyless.headers["www-authenticate"] == "Bearer"
        assert (await gateway.client.get("/healthz")).status_code == 200
        keys.write_text("sk-third\n")
        assert [await served(key) for key in ("sk-first", "sk-third")] == [False, True]
        keys.unlink()
        assert await served("sk-third")

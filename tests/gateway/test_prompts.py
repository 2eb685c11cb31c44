"""Batches of prompts, their logprobs, and the fields around prompts, as at OpenAI and vLLM."""

import asyncio
import json

import pytest

from tests.support.scripted_ranks import (
    BOUND_S,
    END_TOKEN,
    VOCAB_SIZE,
    Fault,
    all_events,
    undisturbed,
)

PROMPTS = ["def f(", "class A:", "x = "]


def text_of(prompt, max_tokens):
    return bytes(undisturbed(tuple(prompt.encode()), max_tokens)).decode()


async def ask(gateway, path="/v1/completions", **fields):
    response = await gateway.client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def chat(gateway, content, **fields):
    messages = [{"role": "user", "content": content}]
    return ask(gateway, "/v1/chat/completions", messages=messages, **fields)


def asked_of(fleet):
    return [request for rank in fleet.ranks for request in rank.requests]


async def streamed(gateway, **fields):
    async with gateway.stream(**fields) as response:
        assert response.status_code == 200, await response.aread()
        *events, done = await all_events(response)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("as_tokens", [False, True])
async def test_a_batch_has_n_consecutive_choices_for_each_prompt(gateway, fleet, as_tokens):
    prompts = [list(prompt.encode()) for prompt in PROMPTS] if as_tokens else PROMPTS
    answer = await ask(gateway, prompt=prompts, n=2, max_tokens=5, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [
        text_of(prompt, 5) for prompt in PROMPTS for _ in range(2)
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert answer["usage"]["completion_tokens"] == 30
    seeds = {(len(one.prompt), one.sampling.seed) for one in asked_of(fleet)}
    assert seeds == {(len(prompt), seed) for prompt in PROMPTS for seed in (7, 8)}


@pytest.mark.parametrize("unnamed", [{}, {"seed": None}])
async def test_equal_prompts_without_a_seed_are_sampled_independently(gateway, fleet, unnamed):
    await ask(gateway, prompt=["def f("] * 4, n=2, max_tokens=1, **unnamed)
    assert len({one.sampling.seed for one in asked_of(fleet)}) == 8


async def test_a_streamed_batch_adds_up_to_the_whole(gateway):
    whole = await ask(gateway, prompt=PROMPTS, n=2, max_tokens=7, echo=True, logprobs=1)
    parts = await streamed(gateway, prompt=PROMPTS, n=2, max_tokens=7, echo=True, logprobs=1)
    for expected in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        for name, values in expected["logprobs"].items():
            assert [one for choice in mine for one in choice["logprobs"][name]] == values
        assert mine[-1]["finish_reason"] == expected["finish_reason"] == "length"
        prompts = [choice.get("prompt_token_ids") for choice in mine]
        assert prompts == [list(PROMPTS[expected["index"] // 2].encode())] + [None] * 6


async def test_a_large_batch_leaves_room_for_other_requests(gateway, fleet):
    for rank in fleet.ranks:
        rank.gate.clear()
    asking = asyncio.create_task(ask(gateway, prompt=["a"] * 100, max_tokens=1))
    for rank in fleet.ranks:
        await rank.until(lambda rank=rank: rank.num_open >= 16)
    await asyncio.sleep(0.1)
    assert fleet.num_requests == 32
    for rank in fleet.ranks:
        rank.gate.set()
    assert len((await asking)["choices"]) == 100
    assert fleet.num_requests == 100


@pytest.mark.parametrize("breaks", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(gateway, fleet, breaks):
    if breaks:
        fleet.fail(Fault(after=1))
    prompt = PROMPTS[0]
    answer = await ask(gateway, prompt=prompt, max_tokens=3, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    text = prompt + text_of(prompt, 3)
    assert choice["text"] == text
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(text)
    assert logprobs["text_offset"] == list(range(len(text)))
    assert logprobs["token_logprobs"] == [None, *(-ord(letter) / 64 for letter in text[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"e": -101 / 64, "f": -101 / 64 - 1}
    assert answer["usage"]["completion_tokens"] == 3
    requests = sorted(asked_of(fleet), key=lambda request: request.num_replayed)
    assert requests[0].prompt_logprobs == 2
    assert not any(one.HasField("prompt_logprobs") for one in requests[1:])
    assert len(requests) == 1 + 2 * breaks


async def test_the_prompt_alone_is_scored_without_output(gateway, fleet):
    answer = await ask(gateway, prompt=["ab", "c"], max_tokens=0, echo=True, logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [["a", "b"], ["c"]]
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    response = await gateway.post(prompt="ab", max_tokens=0)
    assert response.json()["error"]["param"] == "max_tokens"


async def test_prompt_logprobs_have_vllms_form(gateway):
    answer = await ask(gateway, prompt="abc", max_tokens=1, prompt_logprobs=2)
    (choice,) = answer["choices"]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -98 / 64, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -98 / 64 - 1, "rank": 2, "decoded_token": "c"},
    }
    assert choice["logprobs"] is None
    whole = await chat(gateway, "hello", max_tokens=1, prompt_logprobs=0)
    assert len(whole["prompt_logprobs"]) == len("[user]hello")
    assert whole["prompt_logprobs"][-1]["111"]["rank"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ({"prompt_logprobs": 1, "n": 8}, "prompt_logprobs"),
    ],
)
async def test_an_answer_has_a_bounded_number_of_prompt_logprobs(gateway, fleet, fields, param):
    """A body of 1 MiB could ask for an answer of 700 MB."""
    prompts = [[1] * 200] * 100
    response = await gateway.post(prompt=prompts, max_tokens=1, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "send fewer prompts" in error["message"]
    assert fleet.num_requests == 0
    few = await ask(gateway, prompt=prompts[:2], max_tokens=1, prompt_logprobs=20)
    assert len(few["choices"][0]["prompt_logprobs"]) == 200


CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a"] * 17, "logprobs": 1}),
        ("/v1/completions", {"prompt": "a" * 2200, "logprobs": 1, "n": 16, "echo": True}),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 20, "n": 2}),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2, "n": 16}),
    ],
)
async def test_a_whole_answer_has_a_bounded_number_of_logprobs(run_gateway, fleet, path, fields):
    """Sixteen choices could take a gigabyte, and 13 s in which no other request got a token."""
    async with run_gateway(workers=tuple(fleet.addresses), context_length=16384) as gateway:
        response = await gateway.client.post(path, json={"max_tokens": 8192, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "logprobs")
        assert "ask for fewer logprobs, tokens (max_tokens) or choices (n)" in error["message"]
        assert fleet.num_requests == 0
        # Fewer tokens may have them, and generated ones in a stream, which are sent one by one.
        for change in ({"max_tokens": 4096}, {"max_tokens": 8192, "stream": True}):
            body = {**fields, **change, "stop_token_ids": [*range(VOCAB_SIZE)]}
            response = await gateway.client.post(path, json=body)
            assert response.status_code == 200, response.text


async def test_logprobs_of_prompts_and_of_generated_tokens_count_together(gateway):
    fields = {"prompt": [[1] * 100] * 20, "max_tokens": 100, "prompt_logprobs": 20, "logprobs": 20}
    await ask(gateway, **fields)
    error = (await gateway.post(**{**fields, "n": 4})).json()["error"]
    assert error["param"] == "logprobs"
    assert "could make an answer of 336000 logprobs, more than 262144" in error["message"]


async def test_prompt_token_ids_come_with_token_ids(gateway):
    answer = await ask(gateway, prompt=["ab", "c"], max_tokens=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97, 98], [99]]
    whole = await chat(gateway, "a", max_tokens=2, return_token_ids=True)
    assert whole["prompt_token_ids"] == list(b"[user]a")
    assert "prompt_token_ids" not in whole["choices"][0]


async def test_usage_counts_the_prompts_cached_tokens_once(gateway, fleet):
    for rank in fleet.ranks:
        rank.num_cached = 4
    answer = await ask(gateway, prompt=["abcdef", "ghijkl"], n=3, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    options = {"include_usage": True}
    *_, last = await streamed(
        gateway, prompt=["abcdef", "ghijkl"], n=3, max_tokens=1, stream_options=options
    )
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_continuous_usage_counts_every_choice_as_it_grows(gateway):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = await streamed(
        gateway, prompt=["abc", "d"], max_tokens=3, stream_options=options
    )
    for index, num_prompt in enumerate((3, 1)):
        counts = [part["usage"] for part in parts if part["choices"][0]["index"] == index]
        assert [one["completion_tokens"] for one in counts] == [1, 2, 3]
        assert {one["prompt_tokens"] for one in counts} == {num_prompt}
        assert counts[-1]["total_tokens"] == num_prompt + 3
    assert last["usage"]["total_tokens"] == 10
    quiet = {"include_usage": False, "continuous_usage_stats": True}
    assert all(
        "usage" not in part
        for part in await streamed(gateway, prompt="a", max_tokens=2, stream_options=quiet)
    )


async def test_what_changes_sampling_reaches_the_ranks(gateway, fleet):
    fleet.fail(Fault(after=2))
    await ask(gateway, prompt="abc", max_tokens=9, min_tokens=4, logit_bias={"65": -100, "9": 0.5})
    for request in asked_of(fleet):
        assert request.min_tokens == 4
        assert dict(request.logit_bias) == {65: -100.0, 9: 0.5}
    assert len(asked_of(fleet)) == 3


async def test_stop_strings_do_not_end_a_choice_before_min_tokens(gateway):
    text = text_of("abc", 12)
    for min_tokens in range(9):
        answer = await ask(
            gateway, prompt="abc", max_tokens=12, stop=[text[3], text[8]], min_tokens=min_tokens
        )
        places = [text.find(stop, min_tokens) for stop in (text[3], text[8])]
        assert answer["choices"][0]["text"] == text[: min(one for one in places if one >= 0)]


async def test_the_models_own_defaults_apply_to_fields_that_are_missing(
    run_gateway, fleet, checkpoint
):
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "min_p": None}
    ends = {"eos_token_id": [END_TOKEN, 33]}
    (checkpoint / "generation_config.json").write_text(json.dumps(config | ends))
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        await ask(gateway, prompt="a", max_tokens=1)
        await ask(gateway, prompt="ab", max_tokens=1, temperature=0, top_p=None, top_k=-1)
    first, second = sorted(asked_of(fleet), key=lambda request: len(request.prompt))
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (
        0.6,
        0.95,
        20,
    )
    assert (second.sampling.temperature, second.sampling.top_p, second.sampling.top_k) == (
        0,
        0.95,
        0,
    )
    assert list(first.stop_tokens) == [33, END_TOKEN]


async def test_a_conversation_may_continue_its_last_message(gateway, fleet):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b  "}]
    path = "/v1/chat/completions"
    await ask(gateway, path, messages=messages, max_tokens=1, continue_final_message=True)
    await ask(gateway, path, messages=messages, max_tokens=1, add_generation_prompt=False)
    await ask(gateway, path, messages=messages, max_tokens=1, chat_template_kwargs={"mood": "sad"})
    prompts = {bytes(request.prompt).decode() for request in asked_of(fleet)}
    assert prompts == {
        "[user]a[assistant] b  ",
        "[user]a[assistant] b  .",
        "[user]a[assistant] b  (sad)",
    }
    counted = await ask(gateway, "/tokenize", messages=messages, continue_final_message=True)
    assert counted["count"] == len("[user]a[assistant] b  ")


async def test_metrics_are_on_the_clients_port_behind_its_keys(run_gateway, fleet, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    async with run_gateway(workers=tuple(fleet.addresses), api_keys=keys) as gateway:
        assert (await gateway.client.get("/metrics")).status_code == 401
        headers = {"authorization": "Bearer sk-one"}
        response = await gateway.client.get("/metrics", headers=headers, timeout=BOUND_S)
    assert response.status_code == 200
    assert "equipoise_gateway_requests_total{" in response.text

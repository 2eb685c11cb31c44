"""Responses and errors over real HTTP have OpenAI's form."""

import asyncio
import json

import grpc
import pytest

from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise_api.v1 import worker_pb2 as pb
from tests.support.scrapes import free_address, scrape
from tests.support.scripted_ranks import (
    BOUND_S,
    END_TOKEN,
    Fault,
    all_events,
    events,
    tokens_of,
    undisturbed,
)

PROMPT = "def balance("
TOKENS = tuple(PROMPT.encode())


def text_of(max_tokens):
    return bytes(undisturbed(TOKENS, max_tokens)).decode()


def says(text):
    """A fault by which a rank says this text and is done."""
    return Fault(
        also=(
            pb.GenerateResponse(
                tokens=[*text.encode(), END_TOKEN], finish_reason=pb.FINISH_REASON_STOP
            ),
        )
    )


async def test_a_whole_response_has_openais_form(gateway):
    response = await gateway.post(model="tiny", prompt=PROMPT, max_tokens=8)
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["created"] > 1_600_000_000
    assert answer["choices"] == [
        {"index": 0, "text": text_of(8), "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 8,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_tokens_and_text_are_the_same_prompt(gateway):
    by_text = await gateway.post(prompt=PROMPT, return_token_ids=True)
    by_tokens = await gateway.post(prompt=list(TOKENS), return_token_ids=True)
    assert by_text.json()["choices"] == by_tokens.json()["choices"]
    assert len(by_text.json()["choices"][0]["token_ids"]) == 16


async def test_a_stream_is_server_sent_events_that_add_up_to_the_whole(gateway):
    async with gateway.stream(prompt=PROMPT, max_tokens=9) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = await all_events(response)
    assert chunks[-1] == "[DONE]"
    parts = [json.loads(data) for data in chunks[:-1]]
    assert len({part["id"] for part in parts}) == 1
    assert "".join(part["choices"][0]["text"] for part in parts) == text_of(9)
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * 8 + ["length"]
    assert all("usage" not in part for part in parts)


async def test_a_stream_is_sent_as_it_is_generated(gateway, fleet):
    fleet.fail(Fault(after=3, hang=True))
    async with gateway.stream(prompt=PROMPT, max_tokens=9) as response:
        coming = events(response)
        three = [json.loads(await anext(coming)) for _ in range(3)]
    assert "".join(part["choices"][0]["text"] for part in three) == text_of(9)[:3]


async def test_a_stream_reports_usage_on_request(gateway):
    async with gateway.stream(
        prompt=PROMPT, max_tokens=3, stream_options={"include_usage": True}
    ) as response:
        *parts, last, done = await all_events(response)
    assert done == "[DONE]"
    assert [json.loads(part)["usage"] for part in parts] == [None] * 3
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["completion_tokens"] == 3


async def test_no_event_has_half_a_character(gateway, fleet):
    text = "Ĝis la ☃ 🜁"
    one_by_one = tuple(pb.GenerateResponse(tokens=[token]) for token in text.encode())
    fleet.fail(Fault(also=(*one_by_one, *says("").also)))
    async with gateway.stream(prompt=PROMPT, max_tokens=99, return_token_ids=False) as response:
        *chunks, _ = await all_events(response)
    texts = [json.loads(data)["choices"][0]["text"] for data in chunks]
    assert [piece for piece in texts if piece] == list(text)


async def test_the_end_token_stops_without_text(gateway, fleet):
    fleet.fail(says("the end"))
    answer = (await gateway.post(prompt=PROMPT, max_tokens=99)).json()
    assert answer["choices"][0]["text"] == "the end"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert [list(rank.requests[0].stop_tokens) for rank in fleet.ranks if rank.requests] == [
        [END_TOKEN]
    ]


async def test_ignore_eos_sends_no_stop_tokens(gateway, fleet):
    await gateway.post(prompt=PROMPT, ignore_eos=True)
    assert [list(rank.requests[0].stop_tokens) for rank in fleet.ranks if rank.requests] == [[]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_frees_the_rank(gateway, fleet, stream):
    fleet.fail(
        Fault(also=tuple(pb.GenerateResponse(tokens=[token]) for token in b"one\n\ntwo"), hang=True)
    )
    if stream:
        async with gateway.stream(prompt=PROMPT, max_tokens=99, stop=["\n\n"]) as response:
            *chunks, done = await all_events(response)
        assert done == "[DONE]"
        choices = [json.loads(data)["choices"][0] for data in chunks]
    else:
        response = await gateway.post(prompt=PROMPT, max_tokens=99, stop="\n\n")
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one"
    assert choices[-1]["finish_reason"] == "stop"
    await fleet.until_idle()


@pytest.mark.parametrize("stop", [None, "\n\n"])
async def test_an_answer_that_ends_well_counts_as_finished(run_gateway, fleet, stop):
    tokens = tuple(pb.GenerateResponse(tokens=[token]) for token in b"one\n\ntwo")
    if stop:
        fleet.fail(Fault(also=tokens, hang=True))
    address = free_address()
    metrics = MetricsPort(metrics_listen=address)
    async with run_gateway(workers=tuple(fleet.addresses), metrics=metrics) as gateway:
        response = await gateway.post(prompt=PROMPT, max_tokens=9, stop=stop)
        assert response.status_code == 200
        samples = (await scrape(address))["equipoise_gateway_requests"].samples
    assert {one.labels["outcome"]: one.value for one in samples if one.value} == {"finished": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_the_rank(gateway, fleet, stream):
    fleet.fail(Fault(after=4, hang=True))
    body = {"prompt": PROMPT, "max_tokens": 99, "stream": stream}

    async def be_client():
        async with gateway.client.stream("POST", "/v1/completions", json=body) as response:
            await all_events(response)

    client = asyncio.create_task(be_client())
    await fleet.until_open()
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    await fleet.until_idle()


async def test_a_client_that_hangs_up_leaves_the_queue(run_gateway):
    async with run_gateway(balancer=("127.0.0.1:1",), max_queued_requests=1) as gateway:
        requests = {asyncio.create_task(gateway.post(prompt=PROMPT)) for _ in range(2)}
        # Whichever arrives first takes the only place; the rejection of the other shows it.
        (rejected,), (queued,) = await asyncio.wait(
            requests, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert rejected.result().json()["error"]["code"] == "queue_full"
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        # The place is free again as soon as a request is not rejected.
        async with asyncio.timeout(BOUND_S):
            while await is_rejected(gateway):
                pass


async def is_rejected(gateway):
    """Whether a request is rejected at once; it is cancelled when it is queued."""
    request = asyncio.create_task(gateway.post(prompt=PROMPT))
    done, _ = await asyncio.wait({request}, timeout=0.1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    return bool(done)


async def test_a_client_that_does_not_read_is_disconnected(run_gateway, fleet):
    text = "x" * 4000
    for rank in fleet.ranks:
        rank.context_length = 2**21
    fleet.fail(Fault(also=(pb.GenerateResponse(tokens=text.encode()),) * 4000, hang=True))
    async with run_gateway(
        workers=tuple(fleet.addresses), client_timeout_s=0.2, max_tokens=2**20
    ) as gateway:
        body = {"prompt": PROMPT, "max_tokens": 2**20, "stream": True}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            # Nothing is read from here on.
            await fleet.until_idle()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", "a string or a list of token ids"),
        ({"prompt": ""}, "prompt", "1 to 8192 tokens, not 0"),
        ({"prompt": "x" * 8193}, "prompt", "1 to 8192 tokens, not 8193"),
        ({"prompt": [1, 272]}, "prompt", "tokens 0 to 271, not 272"),
        ({"prompt": [1, -1]}, "prompt", "tokens 0 to 271, not -1"),
        ({"prompt": [1, True]}, "prompt", "a string or a list"),
        ({"prompt": ["a", ""]}, "prompt[1]", "1 to 8192 tokens, not 0"),
        ({"prompt": ["a", [1]], "n": 0}, "n", "from 1 to 16, not 0"),
        ({"prompt": [[1], ["a"]]}, "prompt[1]", "a string or a list of token ids"),
        ({"prompt": [[1], [272]]}, "prompt[1]", "tokens 0 to 271, not 272"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts"),
        ({"prompt": ["a"] * 513, "n": 2}, "n", "times 513 prompts is more than 1024 choices"),
        ({"prompt": "\ud800"}, "prompt", "unpaired surrogate"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "from 1 to 8192, not 0"),
        ({"prompt": "a", "max_tokens": 8193}, "max_tokens", "not 8193"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "not true"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", "from 0 to 2, not -0.1"),
        ({"prompt": "a", "temperature": "1"}, "temperature", 'not "1"'),
        ({"prompt": "a", "top_p": 0}, "top_p", "must be above 0"),
        ({"prompt": "a", "top_p": 1.5}, "top_p", "from 0 to 1, not 1.5"),
        ({"prompt": "a", "min_p": 2}, "min_p", "from 0 to 1, not 2"),
        ({"prompt": "a", "top_k": 0.5}, "top_k", "whole number"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0.01 to 100, not 0"),
        ({"prompt": "a", "repetition_penalty": 1e-38}, "repetition_penalty", "100, not 1e-38"),
        ({"prompt": "a", "temperature": 10**400}, "temperature", "from 0 to 2, not 1000"),
        ({"prompt": "a", "\ud800": 1}, "\\ud800", "unknown field"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "from -2 to 2, not 3"),
        ({"prompt": "a", "seed": 2**64}, "seed", "whole number"),
        ({"prompt": "a", "n": 17}, "n", "from 1 to 16, not 17"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20, not 21"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20, not -1"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "in a stream"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "must equal n in a stream"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of", "from 2 to 16, not 1"),
        ({"prompt": ["a"] * 65, "best_of": 16}, "best_of", "more than 1024 choices"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "from 0 to 16, not 17"),
        (
            {"prompt": "a", "min_tokens": 1, "stop_token_ids": [*range(272)]},
            "min_tokens",
            "every token is a stop token",
        ),
        ({"prompt": "a", "suffix": "b"}, "suffix", '"b" is not supported'),
        ({"prompt": "a", "logit_bias": {"272": 1}}, "logit_bias", 'tokens 0 to 271, not "272"'),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", 'not "-1"'),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100, not 101"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias", "must be an object"),
        ({"prompt": "a", "stop_token_ids": [272]}, "stop_token_ids", "tokens 0 to 271, not 272"),
        ({"prompt": "a", "stop": ""}, "stop", "not empty"),
        ({"prompt": "a", "stop": ["a"] * 257}, "stop", "up to 256"),
        ({"prompt": "a", "stop": ["a" * 4000, "b" * 97]}, "stop", "at most 4096 characters"),
        ({"prompt": "a", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "needs stream: true"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "no"),
        ({"prompt": "a", "max_token": 5}, "max_token", 'unknown field "max_token"'),
    ],
)
async def test_an_invalid_request_names_the_field(gateway, fleet, fields, param, words):
    response = await gateway.client.post("/v1/completions", content=json.dumps(fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert fleet.num_requests == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 0.5, "n": 1, "echo": False, "logprobs": None},
        {"seed": 7, "user": "somebody", "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
        {"model": "tiny", "stop": None, "max_tokens": None, "stream": None},
    ],
)
async def test_fields_without_effect_are_accepted(gateway, fields):
    response = await gateway.post(prompt=PROMPT, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == text_of(16)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b"[]", b"3", b"[" * 100_000),
        *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "user": {"a": -Infinity}}'),
        b'{"prompt": "a", "temperature": 1e400}',
    ],
)
async def test_a_body_that_is_not_a_json_object_is_rejected(gateway, body):
    response = await gateway.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "the body" in response.json()["error"]["message"]


async def test_a_body_above_the_limit_is_rejected(run_gateway, fleet):
    async with run_gateway(workers=tuple(fleet.addresses), max_body_bytes=100) as gateway:
        assert (await gateway.post(prompt="a" * 100)).status_code == 413
        assert (await gateway.post(prompt="a" * 10)).status_code == 200


async def test_a_body_that_does_not_arrive_times_out(run_gateway, fleet):
    async with run_gateway(workers=tuple(fleet.addresses), client_timeout_s=0.2) as gateway:
        url = gateway.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        status = await asyncio.wait_for(reader.readline(), BOUND_S)
        writer.close()
    assert b" 408 " in status


async def test_another_model_is_not_found(gateway):
    response = await gateway.post(model="gpt-9", prompt=PROMPT)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("GET", "/v2", 404), ("POST", "/v1/models", 405)],
)
async def test_unknown_paths_and_methods_get_openai_errors(gateway, method, path, status):
    response = await gateway.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_the_one_model_is_listed(gateway):
    (entry,) = (await gateway.client.get("/v1/models")).json()["data"]
    assert entry["id"] == "tiny"
    assert entry["object"] == "model"


async def test_a_workers_rejection_reaches_the_client(gateway, fleet):
    fleet.fail(Fault(code=grpc.StatusCode.INVALID_ARGUMENT, accept=False))
    async with gateway.stream(prompt=PROMPT) as response:
        assert response.status_code == 400
        assert "as the script says" in (await response.aread()).decode()


async def test_one_connection_carries_several_streams_in_turn(gateway):
    for max_tokens in (1, 5):
        async with gateway.stream(prompt=PROMPT, max_tokens=max_tokens) as response:
            assert len(tokens_of(await all_events(response))) == max_tokens


async def test_the_drawn_token_is_among_the_likeliest(gateway, fleet):
    unlikely = pb.TokenLogprob(logprob=-5.0, top_tokens=[66], top_logprobs=[-0.5])
    answer = pb.GenerateResponse(
        tokens=[65], finish_reason=pb.FINISH_REASON_LENGTH, logprobs=[unlikely]
    )
    fleet.fail(Fault(also=(answer,)))
    response = await gateway.post(prompt=PROMPT, max_tokens=1, logprobs=1)
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-5.0]
    assert logprobs["top_logprobs"] == [{"A": -5.0, "B": -0.5}]

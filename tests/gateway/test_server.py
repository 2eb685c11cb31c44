"""The gateway's start, probes, limits and graceful shutdown."""

import asyncio
import json
import resource
import socket
import threading
from contextlib import closing, suppress

import httpx2
import pytest

from equipoise.gateway.errors import GatewayError
from equipoise.gateway.http_server import MAX_HEADER_BYTES
from equipoise.gateway.metrics import RequestTally
from equipoise.gateway.open_requests import LONG_BODY_BYTES, OpenRequests
from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from equipoise.settings.errors import InvalidSettingsError
from tests.support.scripted_ranks import (
    BOUND_S,
    Fault,
    all_events,
    events,
    listening,
    tokens_of,
    undisturbed,
)

PROMPT = (7, 8, 9)


async def test_it_is_ready_when_a_rank_is_available(run_gateway, fleet):
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        assert (await gateway.client.get("/healthz")).status_code == 200
        assert await until_ready(gateway, 200) == {"status": "ready"}


async def until_ready(gateway, status, *, reason="", path="/readyz"):
    async with asyncio.timeout(BOUND_S):
        while True:
            response = await gateway.client.get(path)
            if response.status_code == status and reason in response.text:
                return response.json()


async def test_it_is_not_ready_while_every_worker_is_dead(run_gateway, fleet):
    rank = fleet.ranks[0]
    async with listening(rank) as address:
        pass
    async with run_gateway(workers=(address,)) as gateway:
        await until_ready(gateway, 503, reason=f"{address}: does not serve: UNAVAILABLE")
        for _ in range(20):
            assert (await gateway.client.get("/readyz")).status_code == 503
            await asyncio.sleep(0.05)
        async with listening(rank, address):
            await until_ready(gateway, 200)
        # Without requests.
        await until_ready(gateway, 503)
    assert not rank.requests


async def test_a_chat_may_use_the_context_that_the_ranks_report(run_gateway, fleet):
    fleet.ranks[0].context_length, fleet.ranks[1].context_length = 90, 80
    body = {"messages": [{"role": "user", "content": "hello"}]}
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        async with asyncio.timeout(BOUND_S):
            while True:
                response = await gateway.client.post("/v1/chat/completions", json=body)
                if response.status_code == 200 and response.json()["usage"]["total_tokens"] == 80:
                    break
        too_long = await gateway.post(prompt="hello", max_tokens=76)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_models_name_the_context_that_the_ranks_report(gateway):
    async with asyncio.timeout(BOUND_S):
        while (await gateway.client.get("/v1/models")).json()["data"][0]["max_model_len"] != 256:
            pass


async def test_text_is_tokenized_and_tokens_are_detokenized(gateway, fleet):
    client = gateway.client
    answer = (await client.post("/tokenize", json={"prompt": "hé", "model": "tiny"})).json()
    assert (answer["count"], answer["tokens"]) == (3, [104, 195, 169])
    body = {"tokens": answer["tokens"]}
    assert (await client.post("/detokenize", json=body)).json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": "hé"}]
    answer = (await client.post("/tokenize", json={"messages": messages})).json()
    text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
    assert text.strip() == "[user]hé"
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = (await client.post("/tokenize", json={"messages": messages, "tools": tools})).json()
    text = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
    assert text.strip() == f"{json.dumps(tools[0])}[user]hé"
    assert fleet.num_requests == 0


async def test_the_tokenizers_special_tokens_and_template_are_shown(run_gateway, checkpoint):
    """As lm-eval's remote tokenizer asks for them; a model without any has names alone."""
    config = {"eos_token": {"content": "<end>"}, "bos_token": "<begin>", "model_max_length": 9}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    async with run_gateway(workers=("127.0.0.1:9",)) as gateway:
        answer = await gateway.client.get("/tokenizer_info")
    assert answer.json() == {
        "bos_token": "<begin>", "eos_token": "<end>", "unk_token": None, "pad_token": None,
        "chat_template": (checkpoint / "chat_template.jinja").read_text(),
    }  # fmt: skip
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    async with run_gateway(workers=("127.0.0.1:9",)) as gateway:
        answer = await gateway.client.get("/tokenizer_info")
    assert set(answer.json().values()) == {None}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [272]}, "tokens"),
    ],
)
async def test_an_invalid_tokenization_names_the_field(gateway, path, body, param):
    response = await gateway.client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


async def test_many_stop_strings_are_accepted(gateway):
    response = await gateway.post(prompt="a", max_tokens=4, stop=[f"{n}~~" for n in range(256)])
    assert response.status_code == 200


async def test_health_is_that_of_the_ranks(run_gateway, fleet):
    async with run_gateway(balancer=("127.0.0.1:1",)) as gateway:
        assert (await gateway.client.get("/health")).status_code == 503
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        await until_ready(gateway, 200, path="/health")


async def test_a_chat_without_a_limit_waits_for_no_rank(run_gateway):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    async with run_gateway(balancer=("127.0.0.1:1",)) as gateway:
        response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "context length" in response.json()["error"]["message"]


async def test_it_is_alive_but_not_ready_before_it_knows_a_rank(run_gateway):
    async with run_gateway(balancer=("127.0.0.1:1",)) as gateway:
        assert (await gateway.client.get("/healthz")).status_code == 200
        response = await gateway.client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["reason"] == "no rank is known"


async def test_shutdown_finishes_open_streams_and_rejects_new_requests(run_gateway, fleet):
    for rank in fleet.ranks:
        rank.gate.clear()
    async with run_gateway(workers=tuple(fleet.addresses), drain_timeout_s=BOUND_S) as gateway:
        stream = asyncio.create_task(whole_stream(gateway))
        await fleet.until_open()
        gateway.stop.set()
        gateway.stop.set()
        async with asyncio.timeout(BOUND_S):
            while (await gateway.client.get("/readyz")).status_code == 200:
                pass
        rejected = await gateway.post(prompt="hello")
        assert rejected.status_code == 503
        assert rejected.json()["error"]["code"] == "gateway_stopping"
        assert int(rejected.headers["retry-after"]) >= 1
        for rank in fleet.ranks:
            rank.gate.set()
        assert tokens_of(await stream) == undisturbed(PROMPT, 12)
        await asyncio.wait_for(gateway.task, BOUND_S)


async def test_a_stream_beyond_the_grace_period_ends_with_an_error_event(run_gateway, fleet):
    fleet.fail(Fault(after=2, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), drain_timeout_s=0.1) as gateway:
        async with gateway.stream(prompt=list(PROMPT), max_tokens=12) as response:
            coming = events(response)
            two = [await anext(coming) for _ in range(2)]
            gateway.stop.set()
            (last,) = [data async for data in coming]
        assert tokens_of([*two, "[DONE]"]) == undisturbed(PROMPT, 12)[:2]
        assert json.loads(last)["error"]["code"] == "gateway_stopping"
        await asyncio.wait_for(gateway.task, BOUND_S)
        await fleet.until_idle()


async def test_a_response_beyond_the_grace_period_is_an_error(run_gateway, fleet):
    fleet.fail(Fault(after=2, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), drain_timeout_s=0.1) as gateway:
        answer = asyncio.create_task(gateway.post(prompt=list(PROMPT)))
        await fleet.until_open()
        gateway.stop.set()
        response = await asyncio.wait_for(answer, BOUND_S)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "gateway_stopping"


async def test_shutdown_without_open_requests_closes_the_port(run_gateway, fleet):
    async with run_gateway(workers=tuple(fleet.addresses), drain_timeout_s=BOUND_S) as gateway:
        gateway.stop.set()
        await asyncio.wait_for(gateway.task, BOUND_S)
        with pytest.raises(httpx2.ConnectError):
            await gateway.client.get("/healthz")


async def test_an_internal_error_has_openais_form_and_the_next_request_is_served(
    run_gateway, fleet, monkeypatch
):
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr("equipoise.gateway.generation.GenerateRequest", lambda *_, **__: 1 / 0)
            response = await gateway.post(prompt="hello")
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert (await gateway.post(prompt="hello")).status_code == 200


async def test_a_used_port_is_a_one_line_error(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(GatewayError, match=f"cannot listen on {address}"):
            await serve(
                GatewaySettings(listen=address, checkpoint=checkpoint), stop=asyncio.Event()
            )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"listen": "8080"}, "listen must be host:port"),
        ({"balancer": ("here",)}, "balancer must be host:port"),
        ({"workers": ("a:1", "a:1")}, "workers lists an address twice"),
        ({"balancer": ()}, "either balancer or workers"),
        ({"max_attempts": 0}, "max_attempts must be from 1 to 1000"),
        ({"queue_timeout_s": 0}, "queue_timeout_s must be from 0.001 to 3600, not 0"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s must be from 0"),
    ],
)
def test_settings_out_of_range_are_named(setting, words):
    with pytest.raises(InvalidSettingsError, match=words):
        GatewaySettings(**setting)


def test_the_packaged_model_has_a_name():
    assert GatewaySettings().model_name == "tiny"
    assert GatewaySettings(model="our-own").model_name == "our-own"


async def whole_stream(gateway):
    async with gateway.stream(prompt=list(PROMPT), max_tokens=12) as response:
        return await all_events(response)


@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HT"])
async def test_a_header_that_does_not_arrive_times_out(run_gateway, fleet, before, begun):
    async with run_gateway(
        workers=tuple(fleet.addresses), client_timeout_s=0.3, idle_timeout_s=1
    ) as gateway:
        url = gateway.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(before)
        if before:
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), BOUND_S)
        writer.write(begun)
        rest = await asyncio.wait_for(reader.read(), BOUND_S)
        writer.close()
    assert rest == b""


async def test_a_header_that_is_too_long_is_rejected(gateway):
    url = gateway.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    begun = b"GET /healthz HTTP/1.1\r\nx-long: "
    writer.write(begun + b"x" * (MAX_HEADER_BYTES + 1 - len(begun)))
    status = await asyncio.wait_for(reader.readline(), BOUND_S)
    writer.close()
    assert b" 400 " in status


async def test_a_slow_response_is_not_a_slow_header(run_gateway, fleet):
    fleet.ranks[0].gate.clear()
    fleet.ranks[1].gate.clear()
    async with run_gateway(workers=tuple(fleet.addresses), client_timeout_s=0.2) as gateway:
        answer = asyncio.create_task(gateway.post(prompt=list(PROMPT), max_tokens=3))
        await fleet.until_open()
        # Longer than a header may take, which is the one thing here that must not matter.
        await asyncio.sleep(0.5)
        for rank in fleet.ranks:
            rank.gate.set()
        assert (await answer).status_code == 200


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), ("# nobody\n\n", "contains no key")]
)
async def test_an_unreadable_key_file_is_a_one_line_error(checkpoint, tmp_path, content, words):
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    settings = GatewaySettings(listen="127.0.0.1:0", checkpoint=checkpoint, api_keys=keys)
    with pytest.raises(GatewayError, match=f"api_keys .*keys.* {words}"):
        await serve(settings, stop=asyncio.Event())


async def exchanged(gateway, *parts):
    """Everything that the gateway answers, up to the end of the connection."""
    url = gateway.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    with closing(writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), BOUND_S)


@pytest.mark.parametrize(
    "header",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-long: " + b"x" * MAX_HEADER_BYTES,
        b"GET /healthz?" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x",
        b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x",
    ],
)
async def test_a_complete_header_that_is_too_long_is_rejected(gateway, header):
    answer = await exchanged(gateway, header + b"\r\n\r\n")
    assert answer.split(b" ")[1] in (b"431", b"400")


async def test_a_body_with_two_lengths_is_rejected_and_its_connection_closed(gateway, fleet):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = await exchanged(
        gateway, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled
    )
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"not both" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert fleet.num_requests == 0


@pytest.mark.parametrize("path", ["/healthz/", "/v1/models/", "/v1/completions/"])
async def test_no_redirect_leads_to_the_host_that_a_client_names(gateway, path):
    response = await gateway.client.get(path, headers={"host": "evil.example"})
    assert response.status_code == 404
    assert "location" not in response.headers


async def test_long_bodies_leave_threads_for_short_ones():
    open_requests, hold = OpenRequests(max_open=99, tally=RequestTally()), threading.Event()
    long = [
        asyncio.create_task(open_requests.parsed(bytes(LONG_BODY_BYTES + 1), lambda _: hold.wait()))
        for _ in range(64)
    ]
    try:
        async with asyncio.timeout(BOUND_S):
            assert await open_requests.parsed(b"short", len) == 5
        assert not any(task.done() for task in long)
    finally:
        hold.set()
        await asyncio.gather(*long)


async def test_idle_connections_keep_out_no_request_and_end_none(run_gateway, fleet, monkeypatch):
    """Without a bound they took all open files: no rank could be reached, and no probe answered."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway, asyncio.timeout(BOUND_S):
        url = gateway.client.base_url

        async def begun():
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            return reader, writer

        requests = [await begun()]
        idle = [await asyncio.open_connection(url.host, url.port) for _ in range(40)]
        assert (await gateway.post(prompt="hello")).status_code == 200
        assert [await reader.read() for reader, _ in idle[:34]] == [b""] * 34
        requests += [await begun() for _ in range(7)]
        reader, writer = await asyncio.open_connection(url.host, url.port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b"", "there is no room while all have a request"
        for other, sending in requests:
            sending.write(body)
            assert (await other.readline()).startswith(b"HTTP/1.1 200 ")
        for _, one in (*idle, *requests, (reader, writer)):
            one.close()


async def test_half_sent_bodies_keep_out_no_other_request(run_gateway, fleet):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    async with run_gateway(workers=tuple(fleet.addresses), max_open_requests=4) as gateway:
        slow = [asyncio.create_task(exchanged(gateway, head)) for _ in range(8)]
        done, waiting = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        response = await gateway.post(prompt="hello")
        assert response.status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert all(task.result().startswith(b"HTTP/1.1 408 ") for task in done)

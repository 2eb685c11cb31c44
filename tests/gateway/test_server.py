"""A gateway starts where it is told, says how it is, and stops without cutting anybody short."""

import asyncio
import json
import socket

import httpx2
import pytest
from scripted_ranks import BOUND_S, Fault, all_events, events, tokens_of, undisturbed

from equipoise.gateway.errors import GatewayError, InvalidSettingsError
from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings

PROMPT = (7, 8, 9)


async def test_it_is_ready_when_a_rank_can_be_asked(run_gateway, fleet):
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        assert (await gateway.client.get("/healthz")).status_code == 200
        assert (await gateway.client.get("/readyz")).json() == {"status": "ready"}


async def test_it_is_alive_but_not_ready_before_it_knows_a_rank(run_gateway):
    async with run_gateway(balancer=("127.0.0.1:1",)) as gateway:
        assert (await gateway.client.get("/healthz")).status_code == 200
        response = await gateway.client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["reason"] == "no rank is known"


async def test_a_stop_lets_open_streams_end_and_turns_new_requests_away(run_gateway, fleet):
    for rank in fleet.ranks:
        rank.gate.clear()
    async with run_gateway(workers=tuple(fleet.addresses), stop_grace_s=BOUND_S) as gateway:
        stream = asyncio.create_task(whole_stream(gateway))
        await fleet.until_open()
        gateway.stop.set()
        gateway.stop.set()
        async with asyncio.timeout(BOUND_S):
            while (await gateway.client.get("/readyz")).status_code == 200:
                pass
        refused = await gateway.post(prompt="hello")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "gateway_stopping"
        assert int(refused.headers["retry-after"]) >= 1
        for rank in fleet.ranks:
            rank.gate.set()
        assert tokens_of(await stream) == undisturbed(PROMPT, 12)
        await asyncio.wait_for(gateway.task, BOUND_S)


async def test_a_stream_that_outlasts_the_grace_ends_with_an_error_event(run_gateway, fleet):
    fleet.fail(Fault(after=2, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), stop_grace_s=0.1) as gateway:
        async with gateway.stream(prompt=list(PROMPT), max_tokens=12) as response:
            coming = events(response)
            two = [await anext(coming) for _ in range(2)]
            gateway.stop.set()
            (last,) = [data async for data in coming]
        assert tokens_of([*two, "[DONE]"]) == undisturbed(PROMPT, 12)[:2]
        assert json.loads(last)["error"]["code"] == "gateway_stopping"
        await asyncio.wait_for(gateway.task, BOUND_S)
        await fleet.until_idle()


async def test_an_answer_that_outlasts_the_grace_is_an_error(run_gateway, fleet):
    fleet.fail(Fault(after=2, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), stop_grace_s=0.1) as gateway:
        answer = asyncio.create_task(gateway.post(prompt=list(PROMPT)))
        await fleet.until_open()
        gateway.stop.set()
        response = await asyncio.wait_for(answer, BOUND_S)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "gateway_stopping"


async def test_a_stop_with_nothing_open_leaves_nobody_listening(run_gateway, fleet):
    async with run_gateway(workers=tuple(fleet.addresses), stop_grace_s=BOUND_S) as gateway:
        gateway.stop.set()
        await asyncio.wait_for(gateway.task, BOUND_S)
        with pytest.raises(httpx2.ConnectError):
            await gateway.client.get("/healthz")


async def test_a_fault_of_ours_is_an_error_in_form_and_the_next_request_is_served(
    run_gateway, fleet, monkeypatch
):
    async with run_gateway(workers=tuple(fleet.addresses)) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr("equipoise.gateway.completions.parse_completion", lambda *_, **__: 1 / 0)
            response = await gateway.post(prompt="hello")
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert (await gateway.post(prompt="hello")).status_code == 200


async def test_a_used_port_is_one_line(checkpoint):
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
        ({"workers": ("a:1", "a:1")}, "workers names an address twice"),
        ({"balancer": ()}, "either balancer or workers"),
        ({"max_attempts": 0}, "max_attempts must be from 1"),
        ({"queue_timeout_s": 0}, "queue_timeout_s must be from 0.001 to 3600, not 0"),
        ({"stop_grace_s": float("nan")}, "stop_grace_s must be from 0"),
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

"""The gateway's metrics: requests by outcome, token times, and their documentation."""

import asyncio
from contextlib import aclosing
from itertools import count

import pytest
from prometheus_client.parser import text_string_to_metric_families

from equipoise.gateway import server
from equipoise.gateway.errors import ContextLengthExceededError, NoRankError
from equipoise.gateway.metrics import GatewayCollector, Outcome, RequestTally
from equipoise.gateway.rank_load import RankInfo, RankState
from equipoise.gateway.rank_table import RankTable
from equipoise.telemetry.exposition import metrics_at
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.wire.inference_messages import GeneratedTokens
from tests.support.authority import Authority
from tests.support.scrapes import documented, free_address, ours, scrape, value_of
from tests.support.scripted_ranks import BOUND_S, Fault


async def two_parts(error=None):
    yield GeneratedTokens(tokens=(1,), finish=None)
    yield GeneratedTokens(tokens=(2, 3), finish=None)
    if error is not None:
        raise error


def every_second():
    seconds = count()
    return lambda: float(next(seconds))


async def test_first_token_and_inter_token_times_are_counted():
    tally = RequestTally()
    parts = [part async for part in tally.counted(two_parts(), now=every_second())]
    assert len(parts) == 2
    assert tally.outcomes == {Outcome.FINISHED: 1}
    assert (tally.tokens, tally.ttft_s.count, tally.itl_s.count) == (3, 1, 1)
    assert tally.itl_s.sum == pytest.approx(tally.ttft_s.sum / 2), "two tokens came at once"


async def test_failures_and_disconnects_are_counted_separately():
    tally = RequestTally()
    for error in (NoRankError("nobody is here"), KeyError("a bug")):
        with pytest.raises(type(error)):
            [part async for part in tally.counted(two_parts(error), now=every_second())]
    async with aclosing(tally.counted(two_parts(), now=every_second())) as parts:
        await anext(parts)
    assert tally.outcomes == {Outcome.FAILED: 2, Outcome.ENDED: 1}


async def test_a_request_that_its_client_must_change_is_no_failure():
    tally = RequestTally()
    too_long = two_parts(ContextLengthExceededError("it is longer than the context"))
    with pytest.raises(ContextLengthExceededError):
        [part async for part in tally.counted(too_long, now=every_second())]
    assert tally.outcomes == {Outcome.REJECTED: 1}


@pytest.mark.parametrize("whole", [True, False])
async def test_requests_that_a_stopping_gateway_cuts_off_have_failed(
    run_gateway, fleet, monkeypatch, whole
):
    tally = RequestTally()
    monkeypatch.setattr(server, "RequestTally", lambda: tally)
    fleet.fail(Fault(after=2, hang=True))
    async with run_gateway(workers=tuple(fleet.addresses), drain_timeout_s=0.1) as gateway:
        answer = asyncio.create_task(gateway.post(prompt=[1, 2], stream=not whole))
        await fleet.until_open()
        gateway.stop.set()
        await answer
        await asyncio.wait_for(gateway.task, BOUND_S)
    assert tally.outcomes == {Outcome.FAILED: 1}


async def test_requests_that_are_not_admitted_are_counted(run_gateway, fleet):
    for rank in fleet.ranks:
        rank.gate.clear()
    settings = {"max_open_requests": 1, "drain_timeout_s": BOUND_S}
    async with run_gateway(workers=tuple(fleet.addresses), **settings) as gateway:
        answer = asyncio.create_task(gateway.post(prompt=[1, 2]))
        await fleet.until_open()
        assert (await gateway.post(prompt=[1, 2])).status_code == 429
        assert await not_admitted(gateway) == 1
        gateway.stop.set()
        async with asyncio.timeout(BOUND_S):
            while (await gateway.client.get("/readyz")).status_code == 200:
                pass
        assert (await gateway.post(prompt=[1, 2])).status_code == 503
        assert await not_admitted(gateway) == 2
        for rank in fleet.ranks:
            rank.gate.set()
        assert (await answer).status_code == 200


async def not_admitted(gateway):
    text = (await gateway.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return value_of(families, "equipoise_gateway_requests_total", outcome="not_admitted")


async def test_the_gateway_exports_exactly_the_documented_metrics():
    tally, ranks = RequestTally(replays=3), RankTable(max_queued=1, clock=lambda: 0.0)
    busy = RankInfo(name="a", address="a:1", state=RankState.OPEN, num_requests=1, report=1)
    ranks.update([busy])
    ranks.note_answer("a:1", context_length=64)
    collector = GatewayCollector(tally, ranks=ranks)
    async with metrics_at(MetricsPort(metrics_listen="127.0.0.1:0"), collector) as address:
        families = await scrape(address)
    assert ours(families) == documented("Gateway") | documented("Every process")
    assert value_of(families, "equipoise_gateway_replays_total") == 3
    assert value_of(families, "equipoise_gateway_ready") == 1


async def test_a_gateway_serves_its_metrics_over_tls(run_gateway, tmp_path):
    authority, address = Authority(tmp_path), free_address()
    port = MetricsPort(metrics_listen=address, metrics_tls=True)
    tls = authority.issue("gateway")
    async with run_gateway(workers=("127.0.0.1:1",), metrics=port, tls=tls) as gateway:
        await gateway.client.get("/healthz")
        families = await scrape(address, ca_file=authority.ca_file)
    assert "equipoise_gateway_ready" in families

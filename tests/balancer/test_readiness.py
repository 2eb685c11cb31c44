"""A balancer that is not ready answers questions, and takes no workers, until it is."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from equipoise.balancer import policy_file as policy_file_module
from equipoise.balancer.server import READY
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise.wire.balancer_messages import JoinEpoch, Rejection
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise_api.v1 import status_pb2, status_pb2_grpc, worker_link_pb2_grpc
from tests.support.balancers import serving
from tests.support.health import until_health

WAIT_S = 60.0
HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"
HEALTH = health_pb2.HealthCheckResponse


@pytest.fixture
async def store(tmp_path):
    opened = SqliteStore(tmp_path / "state.sqlite")
    yield opened
    await opened.close()


async def first_word_to(channel, worker):
    call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect()
    await call.write(to_balancer(worker.hello))
    async with asyncio.timeout(WAIT_S):
        said = from_balancer(await call.read(), hello=worker.hello)
    call.cancel()
    return said


async def until_ready(channel):
    await until_health(channel, READY, timeout_s=WAIT_S)


async def ready(channel):
    request = health_pb2.HealthCheckRequest(service=READY)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def missing(channel):
    stub = status_pb2_grpc.StatusStub(channel)
    return (await stub.ListPools(status_pb2.ListPoolsRequest())).not_ready


@asynccontextmanager
async def compiling(store):
    """A balancer that compiles its planner until the event is set, and a channel to it."""
    compiled = asyncio.Event()
    async with (
        serving(
            store,
            credentials=Credentials(),
            listen="127.0.0.1:0",
            policies=PolicyBook(Policy()),
            drain_timeout_s=0.0,
            warm_up=compiled.wait,
        ) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield compiled, channel


async def test_until_the_planner_is_compiled_workers_are_asked_to_wait(store, worker_of, hello_of):
    worker = worker_of(hello_of(num_ranks=1, slots_per_rank=32))
    async with compiling(store) as (compiled, channel):
        assert await ready(channel) == HEALTH.NOT_SERVING
        assert "compiling the planner" in await missing(channel)
        rejection = await first_word_to(channel, worker)
        assert isinstance(rejection, Rejection)
        assert rejection.not_leading
        assert "compiling the planner" in rejection.reason
        compiled.set()
        await until_ready(channel)
        assert await missing(channel) == ""
        async with asyncio.timeout(WAIT_S):
            said = await first_word_to(channel, worker)
            while not isinstance(said, JoinEpoch):
                said = await first_word_to(channel, worker)


async def test_a_balancer_that_does_not_lead_redirects_before_it_checks_a_hello(
    store, worker_of, hello_of
):
    worker = worker_of(replace(hello_of(), highest_epoch=2**60))
    async with compiling(store) as (compiled, channel):
        rejection = await first_word_to(channel, worker)
        assert isinstance(rejection, Rejection)
        assert rejection.not_leading
        compiled.set()
        await until_ready(channel)
        async with asyncio.timeout(WAIT_S):
            while (rejection := await first_word_to(channel, worker)).not_leading:
                pass
        assert "highest_epoch" in rejection.reason


async def test_a_balancer_without_a_good_policy_does_not_guess_one(store, tmp_path, monkeypatch):
    monkeypatch.setattr(policy_file_module, "POLL_S", 0.02)
    monkeypatch.setattr(policy_file_module, "SETTLE_S", 0.01)
    path = tmp_path / "policy.yaml"
    path.write_text(HEAD + "defaults: {interval: 5}")
    heard = []

    async def hear(reason):
        heard.append(reason)

    async with (
        serving(
            store,
            credentials=Credentials(),
            listen="127.0.0.1:0",
            policies=PolicyBook(Policy(), needs_file=True),
            drain_timeout_s=0.0,
            policy_file=path,
            on_rejection=hear,
        ) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        assert await ready(channel) == HEALTH.NOT_SERVING
        assert "line 3: defaults.interval" in await missing(channel)
        assert len(heard) == 1
        path.write_text(HEAD + "defaults: {interval: 5s}")
        await until_ready(channel)

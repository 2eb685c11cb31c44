"""A failover loses the latest writes under a leader that has nothing to write."""

import asyncio
from functools import partial

import grpc
import pytest

from equipoise.balancer import runner
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.simulation.store import SimStore, StoreServer
from tests.support.agent_ranks import WAIT_S, ranks_of
from tests.support.balancers import serving

balancer = partial(serving, listen="127.0.0.1:0", drain_timeout_s=0.0)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(runner, "COMPARE_S", 0.2)
    return StoreServer()


def contents(server):
    data = server.data
    return {key: data.get((key, "tiny")) for key in ("committed", "members", "hold", "audit")}


async def until_serving(status):
    while True:
        answer = await status.GetStatus(status_pb2.GetStatusRequest())
        if answer.status.health == status_pb2.POOL_HEALTH_SERVING:
            return answer
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("num_writes", [1, 2, 3])
async def test_what_a_failover_lost_is_written_back_without_another_write(
    server, harness, num_writes
):
    # No window closes in this test, so nothing else is written.
    policies = PolicyBook(Policy(interval_s=600.0))
    async with (
        balancer(SimStore(server), policies=policies) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ranks_of(harness, [f"127.0.0.1:{port}"]),
    ):
        status = status_pb2_grpc.StatusStub(channel)
        async with asyncio.timeout(WAIT_S):
            answer = await until_serving(status)
            pause = admin_pb2.PauseRequest(reason="night")
            await admin_pb2_grpc.AdminStub(channel).Pause(pause)
            before = contents(server)
            assert all(before.values())
            epoch = answer.status.epoch
            server.go_back(num_writes)
            assert contents(server) != before
            while contents(server) != before:  # noqa: ASYNC110 - the store sends no event
                await asyncio.sleep(0.05)
            answer = await until_serving(status)  # In the next term: this one ends with a failover.
        assert answer.status.epoch == epoch, "the ranks noticed nothing"
        assert answer.status.hold.paused.endswith(": night")

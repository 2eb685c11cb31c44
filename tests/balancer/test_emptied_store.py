"""A real Redis is emptied under the leader: what the process and the ranks still know."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from redis import Redis

from equipoise.balancer.store.redis_store import RedisStore
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.support.agent_ranks import WAIT_S, ranks_of
from tests.support.balancers import serving

SERVING = status_pb2.POOL_HEALTH_SERVING


class Clients:
    """Clients of a balancer in this process."""

    def __init__(self, address, channel) -> None:
        self.address = address
        self.admin = admin_pb2_grpc.AdminStub(channel)
        self._status = status_pb2_grpc.StatusStub(channel)

    async def until(self, condition):
        """The first state of the pool that fulfils a condition."""
        request = status_pb2.WatchStatusRequest(min_interval_s=0.05)
        async with asyncio.timeout(WAIT_S):
            while True:  # A watch ends when a term does.
                async for answer in self._status.WatchStatus(request, wait_for_ready=True):
                    if condition(answer.status):
                        return answer.status


@pytest.fixture
async def balancer(redis_url):
    store = RedisStore(redis_url)
    policies = PolicyBook(Policy(interval_s=0.3, reform_timeout_s=1.0, report_timeout_s=3.0))
    async with (
        serving(store, listen="127.0.0.1:0", policies=policies, drain_timeout_s=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield Clients(f"127.0.0.1:{port}", channel)
    await store.close()


@pytest.fixture
def empty(redis_url):
    def flush():
        with Redis.from_url(redis_url) as client:
            client.flushall()

    return flush


@asynccontextmanager
async def stored(url):
    store = RedisStore(url)
    yield store
    await store.close()


async def test_holds_and_audit_records_are_written_back_before_anything_is_planned(
    balancer, harness, redis_url, empty
):
    async with ranks_of(harness, [balancer.address]):
        await balancer.until(lambda pool: pool.health == SERVING)
        await balancer.admin.Pause(admin_pb2.PauseRequest(reason="night"))
        await balancer.admin.Pin(admin_pb2.PinRequest(reason="a test"))
        before = await balancer.until(lambda pool: pool.hold.pinned)
        empty()
        async with stored(redis_url) as store, asyncio.timeout(WAIT_S):
            while not (await store.recall("tiny")).hold.reason:  # noqa: ASYNC110 - Redis sends no event
                await asyncio.sleep(0.05)
        after = await balancer.until(lambda pool: pool.health == SERVING)
        assert after.hold.paused.endswith(": night")
        assert after.hold.pinned.endswith(": a test")
        assert [entry.what for entry in after.audit] == [entry.what for entry in before.audit]
        listed = await balancer.admin.ListAudit(admin_pb2.ListAuditRequest())
        assert [(one.sequence, one.what) for one in listed.entries] == [
            (2, "pin the current layout (a test)"),
            (1, "pause (night)"),
        ]
        resumed = await balancer.admin.Resume(admin_pb2.ResumeRequest())
        assert resumed.outcome.sequence == 3
    async with stored(redis_url) as store:
        hold = (await store.recall("tiny")).hold
        assert (hold.paused, hold.pinned.endswith(": a test")) == ("", True)

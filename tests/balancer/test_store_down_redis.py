"""A balancer that leads without Redis, whose store is a Redis that is stopped, or answers late."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.balancer import runner
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.support.agent_ranks import WAIT_S, ranks_of, staged_by_all, switch, traffic
from tests.support.balancers import serving

ANSWER_S = 0.4  # Longest that the store waits for Redis: less than a window lasts.


class Balancer:
    """One that serves in this process, as its clients see it."""

    def __init__(self, address, stub) -> None:
        self.address = address
        self._stub = stub

    async def until(self, condition):
        """The first state of the pool that fulfils a condition."""
        request = status_pb2.WatchStatusRequest(min_interval_s=0.05)
        async with asyncio.timeout(WAIT_S):
            while True:  # A watch ends when a term does.
                async for answer in self._stub.WatchStatus(request, wait_for_ready=True):
                    if condition(answer.status):
                        return answer.status


@asynccontextmanager
async def balancer_on(url, *, store_down):
    policy = Policy(
        interval_s=0.5,
        min_assignments=100.0,
        report_interval_s=0.1,
        cooldown_s=0.1,
        store_down=store_down,
    )
    store = RedisStore(url, timeout_s=ANSWER_S)
    try:
        async with (
            serving(
                store,
                credentials=Credentials(),
                listen="127.0.0.1:0",
                policies=PolicyBook(policy),
                drain_timeout_s=0.0,
            ) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield Balancer(f"127.0.0.1:{port}", status_pb2_grpc.StatusStub(channel))
    finally:
        await store.close()


async def test_a_pause_whose_outcome_is_unknown_holds_once_redis_shows_it(
    redis_server, harness, monkeypatch
):
    monkeypatch.setattr(runner, "COMPARE_S", 0.2)
    async with (
        balancer_on(redis_server.url, store_down="pause") as balancer,
        ranks_of(harness, [balancer.address]),
        grpc.aio.insecure_channel(balancer.address) as channel,
    ):
        await balancer.until(lambda pool: pool.generation == 1)
        admin = admin_pb2_grpc.AdminStub(channel)
        # Redis has the script from here on.
        assert (await admin.Pause(admin_pb2.PauseRequest())).outcome.accepted
        assert (await admin.Resume(admin_pb2.ResumeRequest())).outcome.accepted
        redis_server.pause()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.Pause(admin_pb2.PauseRequest(reason="maintenance"))
        redis_server.resume()
        assert "it is unknown whether this was done" in caught.value.details()
        held = await balancer.until(lambda pool: pool.HasField("hold"))
        assert [record.what for record in held.audit][:1] == ["pause (maintenance)"]
        assert (await admin.Resume(admin_pb2.ResumeRequest())).outcome.accepted


def bound(status, name):
    return next(one for one in status.timeouts if one.name == name)


@pytest.mark.parametrize("trouble", ["stopped", "late"])
@pytest.mark.parametrize("store_down", ["pause", "memory"])
async def test_nothing_is_switched_without_redis_and_the_plan_follows_once_it_is_back(
    redis_server, harness, skewed, store_down, trouble
):
    async with (
        balancer_on(redis_server.url, store_down=store_down) as balancer,
        ranks_of(harness, [balancer.address]) as (ranks, news),
    ):
        await balancer.until(lambda pool: pool.generation == 1)
        hurt, heal = {
            "stopped": (redis_server.kill, redis_server.start),
            "late": (redis_server.pause, redis_server.resume),
        }[trouble]
        hurt()
        words = {"pause": "planning is paused", "memory": "planning continues in memory"}[
            store_down
        ]
        status = await balancer.until(lambda pool: words in pool.health_reason)
        assert "nothing is switched until the store works" in status.health_reason
        assert bound(status, "store").reached or trouble == "stopped"

        async with traffic(ranks, skewed(1)):
            known = status.windows_closed
            if store_down == "memory":
                waits = "the rollout waits for the store"
                status = await balancer.until(lambda pool: waits in pool.last_decision.reason)
                assert not status.last_decision.accepted
            else:
                status = await balancer.until(lambda pool: pool.windows_closed >= known + 5)
                assert not status.HasField("last_decision")
            assert status.balancedness > 0, "loads are learned all the same"
            assert not any(rank.worker.staged for rank in ranks)

            await asyncio.to_thread(heal)
            await news.until(lambda: staged_by_all(ranks, term=1))
        generation = ranks[0].worker.staged.layout.generation
        switch(ranks, step=70)
        status = await balancer.until(lambda pool: pool.generation == generation)
        assert status.generation > 1

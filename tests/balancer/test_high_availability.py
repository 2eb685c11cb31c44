"""Two balancer processes, one Redis, workers that follow: the leader is killed, or only paused."""

import asyncio
import signal
from contextlib import asynccontextmanager

import grpc
import pytest
from redis import Redis

from equipoise.balancer.service.status_service import LEADER_METADATA
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.store import StoreError
from equipoise_api.v1 import status_pb2, status_pb2_grpc
from tests.support.agent_ranks import joining_ranks, ranks_of, staged_by_all, switch, traffic
from tests.support.forked_commands import ForkedProcess
from tests.support.health import NOT_SERVING, SERVING, until_health
from tests.support.redis_server import free_port

pytestmark = pytest.mark.e2e

WAIT_S = 300.0  # The first plan of a fresh installation compiles the planner.
WORKER_LINK = "equipoise_api.v1.WorkerLink"
HEALTHY = status_pb2.POOL_HEALTH_SERVING
ONE_RANK_SHORT = status_pb2.POOL_HEALTH_DEGRADED


class Process:
    """A balancer as a process of its own."""

    def __init__(self, store: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        options = {
            "listen": self.address,
            "store": store,
            "interval-s": "0.3",
            "min-assignments": "100",
            "report-interval-s": "0.1",
            "cooldown-s": "0.1",
            "log-level": "info",
        }
        self.process = ForkedProcess(
            [
                *("-m", "equipoise.cli.main", "balancer"),
                *(f"--{name}={value}" for name, value in options.items()),
            ]
        )

    def signal(self, number) -> None:
        self.process.send_signal(number)

    async def until_health(self, wanted) -> None:
        """Wait until the health of WorkerLink is `wanted`: whether this one leads."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            await until_health(channel, WORKER_LINK, wanted, timeout_s=WAIT_S)

    async def until_status(self, condition):
        """The first state of the pool here that fulfils a condition."""
        async with asyncio.timeout(WAIT_S), grpc.aio.insecure_channel(self.address) as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            request = status_pb2.WatchStatusRequest(min_interval_s=0.05)
            while True:  # A watch ends when its balancer begins to lead, or no longer does.
                async for answer in stub.WatchStatus(request, wait_for_ready=True):
                    if condition(answer.status):
                        return answer.status

    async def until_committed(self, generation) -> None:
        """Wait until the store holds what the ranks run."""
        await self.until_status(lambda pool: pool.generation == generation)

    async def named_leader(self):
        """Which leader an answer of this one names."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = status_pb2_grpc.StatusStub(channel).ListPools(status_pb2.ListPoolsRequest())
            await asyncio.wait_for(call, WAIT_S)
            return dict(await call.trailing_metadata()).get(LEADER_METADATA)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(WAIT_S)


@asynccontextmanager
async def balancers_on(store):
    """Two balancers, the leader first."""
    pair = [Process(store), Process(store)]
    try:
        elected = {asyncio.create_task(one.until_health(SERVING)): one for one in pair}
        done, pending = await asyncio.wait(elected, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*elected, return_exceptions=True)
        leader = elected[done.pop()]
        (follower,) = [one for one in pair if one is not leader]
        await follower.until_health(NOT_SERVING)
        yield leader, follower
    finally:
        for one in pair:
            one.end()


@pytest.fixture
async def store(redis_server):
    opened = RedisStore(redis_server.url, timeout_s=20.0)
    yield opened
    await opened.close()


async def test_a_follower_answers_reads_and_sends_workers_on_to_the_leader(redis_server, harness):
    leader = Process(redis_server.url)
    try:
        async with ranks_of(harness, [leader.address]):
            await leader.until_committed(1)
        follower = Process(redis_server.url)
        try:
            points = f"follows the leader at {leader.address}: connect there"
            status = await follower.until_status(lambda pool: points in pool.health_reason)
            assert status.generation == 1
            assert await follower.named_leader() == leader.address
            assert await leader.named_leader() is None
            async with ranks_of(harness, [follower.address]) as (ranks, _):
                assert len({rank.obeyed[0].term for rank in ranks}) == 1
        finally:
            follower.end()
    finally:
        leader.end()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_the_second_leads_when_the_first_is_gone_and_the_ranks_continue(
    redis_server, store, harness, skewed, end
):
    async with (
        balancers_on(redis_server.url) as (leader, follower),
        ranks_of(harness, [leader.address, follower.address]) as (ranks, news),
    ):
        await leader.until_committed(1)
        term = await store.highest_term() + 1
        leader.signal(end)
        await follower.until_health(SERVING)
        await news.until(lambda: all(rank.obeyed[-1].term == term for rank in ranks))
        assert {rank.worker.epoch for rank in ranks} == {1}, "no rank had to restart"
        async with traffic(ranks, skewed(1)):
            await news.until(lambda: staged_by_all(ranks, term=term))
        generation = ranks[0].worker.staged.layout.generation
        switch(ranks, step=70)
        await follower.until_committed(generation)
        assert await store.highest_term() == term


async def test_a_paused_leader_that_wakes_up_cannot_switch_anything(
    redis_server, store, harness, skewed
):
    async with (
        balancers_on(redis_server.url) as (leader, follower),
        ranks_of(harness, [leader.address, follower.address]) as (ranks, news),
    ):
        for rank in ranks:
            rank.answers = False
        async with traffic(ranks, skewed(1)):
            await news.until(lambda: staged_by_all(ranks, term=1))
            first = ranks[0].worker.staged.layout.generation
            term = await store.highest_term() + 1
            leader.signal(signal.SIGSTOP)
            # The message that would let it continue waits in its sockets until it wakes up.
            for rank in ranks:
                rank.outbox.send(rank.worker.answer_staged())
                rank.worker.staged = None
                rank.answers = True
            await follower.until_health(SERVING)
            await news.until(lambda: staged_by_all(ranks, term=term))
        second = ranks[0].worker.staged.layout.generation
        assert second > first, "a number is never used again"
        switch(ranks, step=90)
        await follower.until_committed(second)
        committed = (await store.recall("tiny")).committed
        before = [len(rank.obeyed) for rank in ranks]

        leader.signal(signal.SIGCONT)
        points = f"follows the leader at {follower.address}: connect there"
        await leader.until_status(lambda pool: points in pool.health_reason)
        for rank, count in zip(ranks, before, strict=True):
            assert all(message.term == term for message in rank.obeyed[count:])
        assert (await store.recall("tiny")).committed.same_placement(committed)
        assert (await store.recall("tiny")).committed.generation == second
        assert await store.highest_term() == term


@pytest.mark.parametrize("trouble", ["killed", "paused", "emptied", "back in time"])
async def test_ranks_serve_on_without_redis_and_are_balanced_again_with_it(
    redis_server, store, harness, skewed, tmp_path, trouble
):
    balancer = Process(redis_server.url)
    try:
        async with ranks_of(harness, [balancer.address]) as (ranks, news):
            await balancer.until_committed(1)
            redis_server.back_up(tmp_path / "older")
            async with traffic(ranks, skewed(1)):
                await news.until(lambda: staged_by_all(ranks, term=1))
            first = ranks[0].worker.staged.layout.generation
            switch(ranks, step=70)
            await balancer.until_committed(first)
            term = await store.highest_term()

            if trouble == "paused":
                redis_server.pause()
            else:
                redis_server.kill()
            await balancer.until_health(NOT_SERVING)
            assert {rank.worker.layout.generation for rank in ranks} == {first}
            if trouble == "paused":
                redis_server.resume()
            elif trouble == "emptied":
                redis_server.restart_empty()
            elif trouble == "back in time":
                redis_server.restart_from(tmp_path / "older")
            else:
                redis_server.start()
            await balancer.until_health(SERVING)

            async with traffic(ranks, skewed(2)):
                await news.until(lambda: staged_by_all(ranks, term=term + 1))
            second = ranks[0].worker.staged.layout.generation
            assert second > first, "a number is never used again"
            switch(ranks, step=90)
            await balancer.until_committed(second)
    finally:
        balancer.end()


async def test_ranks_of_a_high_term_are_led_in_the_first_one_after_everything_was_lost(
    redis_server, store, harness, skewed
):
    await store.fence(term=70_000)
    first = Process(redis_server.url)
    second = None
    try:
        async with ranks_of(harness, [first.address]) as (ranks, news):
            await first.until_committed(1)
            assert {rank.obeyed[-1].term for rank in ranks} == {70_001}
            first.end()
            redis_server.restart_empty()
            second = Process(redis_server.url)
            for rank in ranks:
                rank.agent._addresses = (second.address,)
            await second.until_health(SERVING)
            async with traffic(ranks, skewed(1)):
                await news.until(lambda: all(rank.obeyed[-1].term < 70_000 for rank in ranks))
                await news.until(lambda: staged_by_all(ranks, term=1))
            (term,) = {rank.obeyed[-1].term for rank in ranks}
            generation = ranks[0].worker.staged.layout.generation
            switch(ranks, step=90)
            await second.until_committed(generation)
            with pytest.raises(StoreError, match="Connection closed"):
                await store.highest_term()  # Its connection ended with the former server.
            with pytest.raises(StoreError, match="emptied"):
                await store.highest_term()
            store.reopen()
            assert await store.highest_term() == term
    finally:
        first.end()
        if second is not None:
            second.end()


@asynccontextmanager
async def ending(balancer):
    try:
        yield
    finally:
        balancer.end()


async def test_an_epoch_that_ranks_join_while_the_store_is_emptied_is_followed_by_a_higher_one(
    redis_server, harness
):
    balancer = Process(redis_server.url)
    async with ending(balancer), joining_ranks(harness, [balancer.address]) as (ranks, news):
        for rank in ranks:
            rank.form()
        await balancer.until_status(lambda pool: pool.health == HEALTHY)
        await ranks.pop().die()
        for rank in ranks:
            rank.fail()
        await news.until(lambda: all(rank.worker.epoch == 2 for rank in ranks))
        with Redis.from_url(redis_server.url) as client:
            client.flushall()
        await news.until(lambda: all(rank.worker.epoch > 2 for rank in ranks))
        for rank in ranks:
            rank.form()
        await balancer.until_status(
            lambda pool: pool.health == ONE_RANK_SHORT and len(pool.ranks) == 3
        )

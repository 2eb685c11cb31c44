"""Pools of one balancer: a fault or load in one of them delays no other."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from opentelemetry.trace import NoOpTracer

from equipoise.balancer import pools as pools_module
from equipoise.balancer.clock import steady_clock
from equipoise.balancer.loop_share import LoopShares
from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.pools import Pools
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.unreadable import UnreadablePools
from equipoise.planning import proposal as planner_module
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import propose
from equipoise.policy.book import PolicyBook
from equipoise.wire.balancer_messages import JoinEpoch
from tests.support.balancers import ThreadPlanner

WAIT_S = 60.0
TEXT = """
apiVersion: equipoise.dev/v1alpha1
kind: BalancePolicy
defaults:
  interval: 100ms
  judging: {minAssignments: 1}
pools:
  stuck: {timeouts: {plan: 50ms}}
  broken: {judging: {cooldown: 77s}}
"""


class Tenure:
    term = 1

    def holds(self):
        return True

    def outranked(self, term):
        raise AssertionError("no other balancer leads")


class Serving:
    """A worker of a pool with one rank that has traffic in every window."""

    def __init__(self, pools, worker) -> None:
        self.pools, self.worker = pools, worker
        self.mailbox = Mailbox()

    async def join(self):
        self.runner = await self.pools.admit(self.worker.hello, self.mailbox)

    async def run(self):
        name = self.worker.hello.worker
        async for message in self.mailbox.messages():
            if isinstance(message, JoinEpoch):
                self.worker.take(message)
                self.runner.receive(name, self.mailbox, self.worker.serving())
                break
        while True:
            self.worker.serve_traffic(np.full((3, 32), 10.0))
            self.runner.receive(name, self.mailbox, self.worker.report())
            await asyncio.sleep(0.02)


def pools_on(store, book):
    return Pools(
        unreadable=UnreadablePools(),
        loop_shares=LoopShares(),
        store=store,
        policies=book,
        clock=steady_clock(),
        tenure=Tenure(),
        planner=ThreadPlanner(),
        tracer=NoOpTracer(),
        known={},
    )


@asynccontextmanager
async def pools_of(tmp_path, worker_of, hello_of, names):
    """Pools that serve, by name."""
    book = PolicyBook(Policy())
    assert book.offer(TEXT, source="test", now=0.0)
    store = SqliteStore(tmp_path / "state.sqlite")
    await store.fence(term=1)
    tasks = []
    async with (
        pools_on(store, book) as pools,
        asyncio.timeout(WAIT_S),
    ):
        for name in names:
            one = Serving(pools, worker_of(hello_of(pool=name, num_ranks=1, slots_per_rank=32)))
            await one.join()
            tasks.append(asyncio.create_task(one.run()))
        yield {name: pools.find(name) for name in names}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()


async def until(runner, condition):
    while not condition(runner.pool):
        await runner.until_changed(runner.pool.revision)


def decided(pool, *, times):
    return pool.journal.last_decision is not None and pool.journal.last_decision.sequence >= times


def reached(pool, name):
    return next(bound for bound in pool.counters.timeouts.all() if bound.name == name)


@pytest.fixture
def released(monkeypatch):
    """Plans of the pool `stuck` end when this is set, those of `broken` break down until then."""
    released = threading.Event()

    def planned(request):
        if request.policy.plan_timeout_s == 0.05:
            released.wait(WAIT_S)
        elif request.policy.cooldown_s == 77.0 and not released.is_set():
            raise MemoryError("no room")
        return propose(request)

    monkeypatch.setattr(planner_module, "propose", planned)
    yield released
    released.set()


async def test_a_plan_that_hangs_or_fails_is_reported_and_retried_and_delays_no_pool(
    tmp_path, worker_of, hello_of, released
):
    names = ("stuck", "broken", "steady")
    async with pools_of(tmp_path, worker_of, hello_of, names) as pools:
        await until(pools["stuck"], lambda pool: reached(pool, "plan").reached >= 3)
        assert "timed out after 0.05 s" in reached(pools["stuck"].pool, "plan").latest
        await until(pools["broken"], lambda pool: pool.counters.rejections.of("plan") >= 2)
        before = pools["stuck"].pool.windows.num_closed
        await until(pools["stuck"], lambda pool: pool.windows.num_closed >= before + 3)
        await until(pools["steady"], lambda pool: decided(pool, times=3))
        assert pools["stuck"].pool.journal.last_decision is None
        released.set()
        await until(pools["broken"], lambda pool: decided(pool, times=1))
        await until(pools["stuck"], lambda pool: decided(pool, times=1))


async def test_a_worker_that_floods_its_pool_delays_no_other(tmp_path, worker_of, hello_of):
    async with pools_of(tmp_path, worker_of, hello_of, ("flood", "steady")) as pools:
        flooded = pools["flood"]

        async def flood():
            while True:
                async with flooded.loop_share.turn():  # As a stream does for each message.
                    flooded.reject("worker-0", kind="report_shape", reason="nonsense " * 50)

        task = asyncio.create_task(flood())
        known = pools["steady"].pool.windows.num_closed
        await until(pools["steady"], lambda pool: pool.windows.num_closed >= known + 5)
        await until(pools["steady"], lambda pool: decided(pool, times=3))
        await until(flooded, lambda pool: pool.counters.rejections.of("report_shape") > 1000)
        assert not pools["steady"].pool.counters.rejections.all()
        task.cancel()


async def test_a_pool_that_does_not_end_is_left_behind_and_named(
    tmp_path, worker_of, hello_of, monkeypatch, caplog
):
    monkeypatch.setattr(pools_module, "END_TIMEOUT_S", 0.05)
    released = asyncio.Event()

    async def deaf(_self):
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()

    monkeypatch.setattr(pools_module.PoolRunner, "run", deaf)
    store = SqliteStore(tmp_path / "state.sqlite")
    await store.fence(term=1)
    book = PolicyBook(Policy())
    async with (
        asyncio.timeout(WAIT_S),
        pools_on(store, book) as pools,
    ):
        await Serving(
            pools, worker_of(hello_of(pool="deaf", num_ranks=1, slots_per_rank=32))
        ).join()
        await asyncio.sleep(0)  # The pool's task begins.
    assert "pool deaf did not end within 0.05 s of its term (it is waiting in deaf" in caplog.text
    released.set()
    await store.close()

"""A balancer with as many pools as it may have: which one gives way to a new pool."""

from contextlib import asynccontextmanager

import pytest
from opentelemetry.trace import NoOpTracer

from equipoise.balancer import pools as pools_module
from equipoise.balancer.loop_share import LoopShares
from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.pools import KEEP_POOL_S, Pools
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import StoreError
from equipoise.balancer.unreadable import UnreadablePools
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.records import AuditRecord, Hold
from tests.support.balancers import ThreadPlanner
from tests.support.store_records import layout_of


class Tenure:
    """A term that a test can end."""

    term = 1
    over = False

    def holds(self):
        return not self.over


class Store(SqliteStore):
    """Fails to forget a pool if it has a fault."""

    fault = None

    async def forget(self, pool, *, term):
        if self.fault is not None:
            raise self.fault
        await super().forget(pool, term=term)


class Bench:
    """Pools of one rank each, and a clock turned by hand."""

    def __init__(self, store, hello_of) -> None:
        self.store, self.hello_of = store, hello_of
        self.now, self.tenure = 1000.0, Tenure()
        self.mailboxes = {}

    @asynccontextmanager
    async def leading(self):
        async with Pools(
            unreadable=UnreadablePools(),
            loop_shares=LoopShares(),
            store=self.store,
            policies=PolicyBook(Policy()),
            clock=lambda: self.now,
            tenure=self.tenure,
            planner=ThreadPlanner(),
            known={},
            tracer=NoOpTracer(),
        ) as pools:
            self.pools = pools
            yield pools

    async def join(self, pool):
        mailbox = self.mailboxes[pool] = Mailbox()
        hello = self.hello_of("worker-0", pool=pool, num_ranks=1, slots_per_rank=32)
        return await self.pools.admit(hello, mailbox)

    def leave(self, pool):
        self.pools.find(pool).leave("worker-0", self.mailboxes[pool], reason="its stream ended")


@pytest.fixture
async def bench(tmp_path, hello_of, monkeypatch):
    monkeypatch.setattr(pools_module, "MAX_POOLS", 3)
    store = Store(tmp_path / "state.sqlite")
    await store.fence(term=1)
    for name in ("a", "b", "c"):
        await store.adopt(name, layout_of(1), term=1)
    yield Bench(store, hello_of)
    await store.close()


async def test_the_pool_that_was_without_workers_longest_gives_way(bench, caplog):
    caplog.set_level("INFO")
    async with bench.leading() as pools:
        for name in ("a", "c"):
            await bench.join(name)
        bench.now += 10
        bench.leave("c")
        bench.now += KEEP_POOL_S
        pools._wave_turns._went_s["b"] = 1.0
        await bench.join("new")
        assert pools.names() == ("a", "c", "new")
        assert "b" not in await bench.store.pools()
        assert "dropped pool b: it had no workers for 3610 s" in caplog.text
        assert "b" not in pools._wave_turns._went_s
        watched = pools.find("c")
        await bench.join("newer")
        assert pools.names() == ("a", "new", "newer")
        assert watched.closed
        with pytest.raises(RejectedWorkerError, match="3 pools, its maximum"):
            await bench.join("newest")
        assert pools.names() == ("a", "new", "newer")


async def test_a_pool_is_kept_while_its_workers_may_come_back(bench):
    async with bench.leading() as pools:
        bench.now += KEEP_POOL_S - 1
        with pytest.raises(RejectedWorkerError, match="workers within the last hour") as caught:
            await bench.join("new")
        assert caught.value.kind == "hello_too_many_pools"
        assert pools.names() == await bench.store.pools() == ("a", "b", "c")


async def test_a_pool_that_an_operator_holds_is_kept(bench):
    record = AuditRecord(time_unix_s=0.0, who="ann", what="pause", accepted=True, outcome="paused")
    for name in ("a", "b"):
        await bench.store.add_audit(name, record, hold=Hold(paused="ann"), after=0, term=1)
    async with bench.leading() as pools:
        bench.now += KEEP_POOL_S
        await bench.join("new")
        assert pools.names() == ("a", "b", "new")
        with pytest.raises(RejectedWorkerError):
            await bench.join("newer")


async def test_a_worker_that_is_rejected_makes_no_room(bench):
    async with bench.leading() as pools:
        bench.now += KEEP_POOL_S
        hello = bench.hello_of("worker-0", pool="new", num_ranks=1, slots_per_rank=1)
        with pytest.raises(RejectedWorkerError, match="cannot hold"):
            await pools.admit(hello, Mailbox())
        assert pools.names() == await bench.store.pools() == ("a", "b", "c")


async def test_a_store_that_does_not_forget_delays_no_worker(bench, caplog):
    bench.store.fault = StoreError("it is down: start it")
    async with bench.leading() as pools:
        bench.now += KEEP_POOL_S
        assert await bench.join("new")
        assert pools.names() == ("b", "c", "new")
    assert "pool a is still in the store" in caplog.text
    assert await bench.store.pools() == ("a", "b", "c")


async def test_no_pool_is_opened_in_a_term_that_ended_meanwhile(bench):
    async with bench.leading() as pools:
        bench.now += KEEP_POOL_S
        bench.tenure.over = True
        assert await bench.join("new") is None
        assert "new" not in pools.names()

"""A pool whose records cannot be read waits for their repair; all other pools are led."""

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest
from opentelemetry.trace import NoOpTracer
from redis import Redis

from equipoise.balancer import pools as pools_module
from equipoise.balancer import runner as runner_module
from equipoise.balancer import seat as seat_module
from equipoise.balancer.clock import steady_clock
from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.lease import Candidate, LeaseTiming
from equipoise.balancer.leadership.redis_register import RedisRegister
from equipoise.balancer.leadership.register import SoleRegister
from equipoise.balancer.loop_share import LoopShares
from equipoise.balancer.pools import Pools
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.seat import Seat
from equipoise.balancer.store.redis_store import HASH_TAG, RedisStore
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import StoreError, UnreadablePoolError
from equipoise.balancer.unreadable import UnreadablePools
from equipoise.policy.book import PolicyBook
from equipoise.pool.records import Hold, PoolMemory
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.wire.balancer_messages import JoinEpoch, Rejection
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.support.balancer_links import POLICY, WAIT_S, linked
from tests.support.balancers import ThreadPlanner, serving
from tests.support.scrapes import scrape, value_of
from tests.support.scripted_worker import ScriptedWorker, make_hello
from tests.support.store_records import AN_ORDER, layout_of

TIMING = LeaseTiming(duration_s=6.0, renew_deadline_s=4.0, retry_s=0.2, request_timeout_s=1.0)
KEY = f"{HASH_TAG}:pool:bad"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(pools_module, "REREAD_S", 0.2)
    monkeypatch.setattr(seat_module, "REFRESH_S", 0.2)


class Balancer:
    """One of several balancers, with a channel to it."""

    def __init__(self, channel, metrics_at) -> None:
        self.channel = channel
        self.metrics_at = metrics_at
        self.status = status_pb2_grpc.StatusStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)

    async def leads(self):
        """Whether it accepts or refuses workers, instead of redirecting them."""
        answer = await self.answer_to("bad")
        return isinstance(answer, JoinEpoch) or not answer.not_leading

    async def pools(self):
        """Summaries by name."""
        listed = await self.status.ListPools(status_pb2.ListPoolsRequest())
        return {pool.pool: pool for pool in listed.pools}

    async def fault(self, call):
        """Code and details of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code(), caught.value.details()

    async def answer_to(self, pool):
        """What a worker of the pool is sent first."""
        async with linked(self.channel, [worker_of(pool)]) as (link,):
            return await link.receive_until(JoinEpoch | Rejection)


@asynccontextmanager
async def balancer(url):
    store, metrics = RedisStore(url, timeout_s=20.0), []
    register = RedisRegister(url, timeout_s=TIMING.request_timeout_s)
    arrangement = serving(
        store,
        listen="127.0.0.1:0",
        metrics=MetricsPort(metrics_listen="127.0.0.1:0"),
        on_metrics=metrics.append,
        policies=PolicyBook(POLICY),
        drain_timeout_s=0.5,
        register=register,
        timing=TIMING,
    )
    try:
        async with arrangement as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Balancer(channel, metrics[0])
    finally:
        await store.close()
        await register.close()


@asynccontextmanager
async def leading(url):
    async with balancer(url) as found:
        await until(found.leads)
        yield found


def worker_of(pool):
    hello = make_hello(f"{pool}-0", pool=pool, num_ranks=1, slots_per_rank=32)
    return ScriptedWorker(hello)


@asynccontextmanager
async def serving_worker(balancer, pool):
    """A worker that serves its pool alone."""
    async with linked(balancer.channel, [worker_of(pool)]) as (link,):
        await link.receive_until(JoinEpoch)
        await link.send(link.worker.serving())
        await until(lambda: is_serving(balancer, pool))
        yield link


async def is_serving(balancer, pool):
    known = await balancer.pools()
    return pool in known and known[pool].health == status_pb2.POOL_HEALTH_SERVING


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - asks a server
            await asyncio.sleep(0.05)


async def test_the_other_pool_is_led_through_changes_of_leaders_and_the_repair_needs_no_restart(
    redis_url, caplog
):
    operator = Redis.from_url(redis_url)
    async with leading(redis_url) as first:
        for pool in ("bad", "good"):
            async with serving_worker(first, pool):
                pass
        await first.admin.Pause(admin_pb2.PauseRequest(pool="bad", reason="for the night"))
    whole = operator.hget(KEY, "hold")
    assert b"for the night" in whole
    operator.hset(KEY, "hold", b'{"paused": "cut sh')
    damaged = {key: operator.dump(key) for key in operator.scan_iter(f"{KEY}*")}

    caplog.set_level(logging.INFO)
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(leading(redis_url))
        async with balancer(redis_url) as third:
            reason = await check_isolated(second, third)
            await stack.aclose()
            await until(third.leads)
            async with serving_worker(third, "good"):
                assert (await third.answer_to("bad")).reason == reason
                assert {key: operator.dump(key) for key in operator.scan_iter(f"{KEY}*")} == damaged
                causes = [one for one in caplog.records if one.getMessage() == reason]
                assert len(causes) == 2, "one line in the log of each balancer"
                operator.hset(KEY, "hold", whole)
                await until(lambda: shows_reason(third, ""))
                async with serving_worker(third, "bad"):
                    asked = status_pb2.GetStatusRequest(pool="bad")
                    found = await third.status.GetStatus(asked)
                    assert "for the night" in found.status.hold.paused
            families = await scrape(third.metrics_at)
            assert value_of(families, "equipoise_pool_unreadable", pool="bad") == 0
    operator.close()


async def check_isolated(leader, follower):
    """The pool `good` is served while `bad` is refused everywhere, for a reason; returns it."""
    async with serving_worker(leader, "good"):
        rejection = await leader.answer_to("bad")
        assert isinstance(rejection, Rejection)
        assert not rejection.fatal
        assert not rejection.not_leading
        assert "pool bad cannot be read" in rejection.reason
        assert "hold: Unterminated string" in rejection.reason
        assert f"restore its keys, {KEY} and {KEY}:*" in rejection.reason
        for one in (leader, follower):
            await until(lambda one=one: shows_reason(one, rejection.reason))
            await check_refused(one, rejection.reason)
            families = await scrape(one.metrics_at)
            assert value_of(families, "equipoise_pool_unreadable", pool="bad") == 1
        refused = leader.admin.Pause(admin_pb2.PauseRequest(pool="bad"))
        assert await leader.fault(refused) == (grpc.StatusCode.DATA_LOSS, rejection.reason)
        async for answer in leader.admin.RebalanceAll(admin_pb2.RebalanceAllRequest()):
            assert answer.pool == "good"
        assert await is_serving(leader, "good")
    return rejection.reason


async def shows_reason(balancer, reason):
    known = await balancer.pools()
    return "bad" in known and known["bad"].unreadable == reason


async def check_refused(balancer, reason):
    """Every call about the pool is refused with the reason; a call without a name is ambiguous."""
    status, code = balancer.status, grpc.StatusCode.DATA_LOSS
    calls = [
        status.GetStatus(status_pb2.GetStatusRequest(pool="bad")),
        status.WatchStatus(status_pb2.WatchStatusRequest(pool="bad")).read(),
        status.GetLoads(status_pb2.GetLoadsRequest(pool="bad")),
        balancer.admin.ListAudit(admin_pb2.ListAuditRequest(pool="bad")),
    ]
    for call in calls:
        assert await balancer.fault(call) == (code, reason)
    code, details = await balancer.fault(status.GetStatus(status_pb2.GetStatusRequest()))
    assert (code, details) == (
        grpc.StatusCode.NOT_FOUND,
        "there are several pools, name one of them: bad, good",
    )


@asynccontextmanager
async def seated(store):
    """A seat that leads alone, and what ends its term."""
    elector = Elector(
        SoleRegister(term=0),
        candidate=Candidate(name="a", address="a:7070", term_offset=1),
        timing=TIMING,
    )
    seat = Seat(
        store=store,
        policies=PolicyBook(POLICY),
        clock=steady_clock(),
        elector=elector,
        readiness=Readiness(),
        planner=ThreadPlanner(),
        tracer=NoOpTracer(),
    )
    await seat.open()
    async with elector.running():
        task = asyncio.create_task(seat.run())
        try:
            yield seat, elector
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await store.close()


async def next_term(seat, elector):
    """End the term that is led, if any, and return the pools of the next one."""
    before = seat.led
    (await elector.tenure()).give_up("so that another one begins")
    async with asyncio.timeout(WAIT_S):
        while seat.led is None or seat.led is before:  # noqa: ASYNC110 - no event for tests
            await asyncio.sleep(0.01)
    return seat.led


async def test_what_the_balancer_still_knows_is_written_back_once_the_damaged_rows_are_deleted(
    tmp_path, monkeypatch, caplog
):
    """Through several terms in which it could not read them; nothing is written before."""
    monkeypatch.setattr(runner_module, "COMPARE_S", 0.1)
    store = SqliteStore(tmp_path / "state")
    await store.adopt("bad", layout_of(7), term=0)
    await store.add_audit("bad", AN_ORDER, hold=Hold(paused="ann"), after=0, term=0)
    async with seated(store) as (seat, elector):
        led = await next_term(seat, elector)
        assert led.find("bad").pool.journal.hold.paused == "ann"
        store._db.execute("UPDATE layouts SET num_experts = 5")
        async with asyncio.timeout(WAIT_S):
            while "the next leader will not lead this pool" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(2):
            led = await next_term(seat, elector)
            assert "layouts 7" in led.unreadable["bad"]
            with pytest.raises(UnreadablePoolError, match="stop the balancer, restore the file"):
                led.find("")
            assert led.names() == ()
        assert store._db.execute("SELECT num_experts FROM layouts").fetchall() == [(5,)]
        for table in ("pools", "layouts", "commits", "audit"):
            store._db.execute(f"DELETE FROM {table} WHERE pool = 'bad'")
        async with asyncio.timeout(WAIT_S):
            while led.unreadable:  # noqa: ASYNC110 - no event for tests
                await asyncio.sleep(0.01)
        assert led.find("").pool.journal.hold.paused == "ann"
        assert (await store.recall("bad")).hold.paused == "ann"
        assert (await store.recall("bad")).next_generation == 8


async def test_a_pool_that_an_error_of_ours_keeps_from_being_read_ends_no_term(
    tmp_path, monkeypatch, caplog
):
    store = SqliteStore(tmp_path / "state")
    for pool in ("bad", "good"):
        await store.adopt(pool, layout_of(1), term=0)
    recall = store.recall

    async def fail_on_one(pool):
        return await recall(pool) if pool == "good" else 1 / 0

    monkeypatch.setattr(store, "recall", fail_on_one)
    async with seated(store) as (seat, elector):
        led = await next_term(seat, elector)
        assert led.names() == ("good",)
        assert "because of a bug in the balancer: ZeroDivisionError" in led.unreadable["bad"]
        failures = [one for one in caplog.records if one.exc_info]
        assert len(failures) == 1, "with its traceback, and once for this process"
        monkeypatch.undo()
        async with asyncio.timeout(WAIT_S):
            while led.names() != ("bad", "good"):  # noqa: ASYNC110 - no event for tests
                await asyncio.sleep(0.01)


async def test_a_store_that_cannot_be_read_still_leaves_no_pool_running(monkeypatch):
    """The store as a whole fails while the second pool is read: the term cannot begin."""
    down = StoreError("the store is down")
    monkeypatch.setattr(pools_module, "restore", AsyncMock(side_effect=[PoolMemory(), down]))
    pools = Pools(
        store=SimpleNamespace(pools=AsyncMock(return_value=["a", "b"])),
        policies=PolicyBook(POLICY),
        clock=lambda: 0.0,
        tenure=SimpleNamespace(term=1),
        planner=None,
        tracer=None,
        known={},
        unreadable=UnreadablePools(),
        loop_shares=LoopShares(),
    )
    with pytest.raises(StoreError, match="the store is down"):
        await pools.__aenter__()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("pool ")]

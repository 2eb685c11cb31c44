"""From follower to leader and back: what is read and shown, and what ends with a term."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from opentelemetry.trace import NoOpTracer

from equipoise.balancer.archive import Archive
from equipoise.balancer.clock import steady_clock
from equipoise.balancer.errors import UnknownPoolError
from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.lease import Candidate, LeaseTiming
from equipoise.balancer.leadership.register import SoleRegister
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.seat import Seat
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import StoreError, StoreFault
from equipoise.balancer.unreadable import UnreadablePools
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.pool.pool import Pool
from equipoise.pool.records import Hold, PoolMemory
from tests.simulation.store import SimStore, StoreServer
from tests.support.balancers import ThreadPlanner
from tests.support.store_records import AN_ORDER

WAIT_S = 60.0
QUICK = LeaseTiming(duration_s=0.6, renew_deadline_s=0.4, retry_s=0.05, request_timeout_s=0.1)


class FaultyStore(SqliteStore):
    """Cannot be read for as long as it has a fault, and is slow while its gate is closed."""

    fault = None

    def __init__(self, path):
        super().__init__(path)
        self.fences = []
        self.reads = 0
        self.read_often = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def fence(self, *, term):
        self.fences.append(term)
        await super().fence(term=term)

    async def pools(self):
        await self.gate.wait()
        self.reads += 1
        if self.reads == 9:
            self.read_often.set()
        if self.fault is not None:
            raise self.fault
        return await super().pools()


@pytest.fixture
async def store(tmp_path):
    opened = FaultyStore(tmp_path / "state.sqlite")
    yield opened
    await opened.close()


@pytest.fixture
async def elector():
    candidate = Candidate(name="a", address="a:7070", term_offset=1)
    return Elector(SoleRegister(term=0), candidate=candidate, timing=QUICK)


def seat_of(store, elector):
    return Seat(
        store=store,
        policies=PolicyBook(Policy()),
        clock=steady_clock(),
        elector=elector,
        readiness=Readiness(),
        planner=ThreadPlanner(),
        tracer=NoOpTracer(),
    )


@asynccontextmanager
async def seated(store, elector):
    """A seat that is being sat on."""
    seat = seat_of(store, elector)
    await seat.open()
    async with elector.running():
        task = asyncio.create_task(seat.run())
        try:
            await asyncio.wait_for(seat.until_settled(), WAIT_S)
            yield seat
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def layout_of(generation):
    return contiguous_layout(
        num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4, generation=generation
    )


async def until_led(seat, elector):
    async with asyncio.timeout(WAIT_S):
        while seat.led is None:
            await elector.tenure()
            await asyncio.sleep(0)
    return seat.led


async def test_the_store_is_fenced_by_the_term_before_a_pool_is_read(store, elector):
    await store.adopt("p", layout_of(3), term=0)
    async with seated(store, elector) as seat:
        assert seat.led is seat.pools
        assert seat.led.find("p").pool.layouts.stored_generation == 3
        assert seat.led.find("p").pool.elsewhere == ""
        assert await store.highest_term() == elector.state.term == 1


async def test_who_holds_the_lease_accepts_workers_once_its_pools_are_read(store, elector):
    seat = seat_of(store, elector)
    store.gate.clear()
    async with elector.running(), asyncio.timeout(WAIT_S):
        task = asyncio.create_task(seat.run())
        accepting = asyncio.create_task(seat.until_led_differs(None))
        while not store.fences:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert elector.leads()
        assert not accepting.done()
        store.gate.set()
        await accepting
        led = seat.led
        assert led is not None
        over = asyncio.create_task(seat.until_led_differs(led))
        (await elector.tenure()).give_up("so that it accepts none")
        await over
        assert seat.led is not led
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_store_that_saw_a_higher_term_is_led_in_a_higher_one_still(store, elector):
    await store.fence(term=30)
    async with seated(store, elector) as seat:
        await until_led(seat, elector)
        assert elector.state.term == 31
        assert await store.highest_term() == 31


async def test_a_slow_read_of_a_follower_delays_no_term_and_one_that_ended_meanwhile_leads_nothing(
    store, elector
):
    seat = seat_of(store, elector)
    async with elector.running(), asyncio.timeout(WAIT_S):
        (await elector.tenure()).give_up("so that the seat follows first")
        store.gate.clear()
        task = asyncio.create_task(seat.run())
        tenure = await elector.tenure()
        while not store.fences:  # noqa: ASYNC110 - no event for tests
            await asyncio.sleep(0.01)
        tenure.give_up("while the store is read")
        store.gate.set()
        await until_led(seat, elector)
        assert store.fences == [2, 3]
        assert seat.led.term == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "fault", [StoreError("it is down: start it"), ZeroDivisionError("a fault of ours")], ids=type
)
async def test_a_store_that_cannot_be_read_ends_the_term_until_it_can(
    store, elector, caplog, fault
):
    seat = seat_of(store, elector)
    await seat.open()
    store.fault = fault
    async with elector.running():
        task = asyncio.create_task(seat.run())
        async with asyncio.timeout(WAIT_S):
            while len(store.fences) < 3:
                await elector.until_changed(elector.state)
        assert seat.led is None
        assert str(fault) in caplog.text
        store.fault = None
        await until_led(seat, elector)
        assert elector.state.term >= 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_store_that_cannot_be_read_at_startup_is_reported(store, elector):
    store.fault = StoreError("wrong password", fault=StoreFault.DENIED)
    with pytest.raises(StoreError, match="wrong password"):
        await seat_of(store, elector).open()


async def test_a_store_that_stays_unreadable_is_logged_ever_more_rarely(
    store, elector, caplog, monkeypatch
):
    monkeypatch.setattr("equipoise.balancer.seat.REFRESH_S", 0.001)
    store.fault = StoreError("it is down: start it")
    seat = seat_of(store, elector)
    seat._readiness.note("planner", "it compiles")
    onlooker = asyncio.create_task(seat.look_on())
    async with asyncio.timeout(WAIT_S):
        await store.read_often.wait()
    onlooker.cancel()
    lines = [one for one in caplog.messages if "it is down" in one]
    counts = [f"({2**power} times so far)" for power in range(store.reads.bit_length())]
    assert all(line.endswith(count) for line, count in zip(lines, counts, strict=True))


async def test_a_store_that_is_busy_at_startup_is_read_later(store, elector):
    await store.adopt("p", layout_of(3), term=0)
    store.fault = StoreError("no answer within 2 s", fault=StoreFault.SLOW)
    seat = seat_of(store, elector)
    await seat.open()
    assert seat.store_fault == "no answer within 2 s"
    store.fault = None
    await seat.open()
    assert seat.pools.names() == ("p",)


async def test_when_a_term_ends_what_was_led_is_still_shown_with_where_to_go(store, elector):
    await store.adopt("p", layout_of(3), term=0)
    async with seated(store, elector) as seat:
        led = seat.led.find("p")
        other = Elector(
            elector._register,
            candidate=Candidate(name="b", address="b:7070", term_offset=1),
            timing=QUICK,
        )
        tenure = await elector.tenure()
        tenure.give_up("to see what happens")
        assert seat.led is None
        async with other.running():
            async with asyncio.timeout(WAIT_S):
                while not led.closed:
                    await led.until_changed(led.pool.revision)
            assert seat.pools.find("p").pool.layouts.stored_generation == 3
            assert seat.pools.find("p").pool.diagnosis().reason


async def test_an_archive_changes_only_when_the_store_does(store):
    archive = Archive(store=store, policies=PolicyBook(Policy()), unreadable=UnreadablePools())
    with pytest.raises(UnknownPoolError):
        archive.find("")
    await store.adopt("p", layout_of(1), term=0)
    await archive.refresh(elsewhere="ask a:7070")
    remembered = archive.find("")
    revision = remembered.pool.revision
    await archive.refresh(elsewhere="ask a:7070")
    assert remembered.pool.revision == revision
    changed = asyncio.create_task(remembered.until_changed(revision))
    await store.adopt("p", layout_of(2), term=0)
    await archive.refresh(elsewhere="ask a:7070")
    await asyncio.wait_for(changed, WAIT_S)
    assert archive.find("p").pool.layouts.stored_generation == 2
    assert archive.find("p").pool.diagnosis().reason == "ask a:7070"
    waiting = asyncio.create_task(remembered.until_changed(remembered.pool.revision))
    archive.close_streams()
    await asyncio.wait_for(waiting, WAIT_S)


async def test_an_archive_keeps_what_a_store_lost():
    """It may be the only one that knows what operators requested."""
    server = StoreServer()
    leader = SimStore(server)
    archive = Archive(
        store=SimStore(server), policies=PolicyBook(Policy()), unreadable=UnreadablePools()
    )
    await leader.fence(term=1)
    await leader.adopt("p", layout_of(1), term=1)
    hold = Hold(paused="ann: night")
    await leader.add_audit("p", AN_ORDER, hold=hold, after=0, term=1)
    await archive.refresh(elsewhere="ask a:7070")
    server.forget()
    leader.reopen()
    await leader.fence(term=2)
    with pytest.raises(StoreError, match="lost its contents"):
        await archive.refresh(elsewhere="ask a:7070")
    await archive.refresh(elsewhere="ask a:7070")
    journal = archive.journals()["p"]
    assert journal.hold == hold
    assert [record.what for record in journal.audit] == [AN_ORDER.what]


async def test_an_archive_keeps_what_was_requested_of_a_pool_that_began_after_a_failover():
    """The store has it no more, as if the leader had forgotten it."""
    server = StoreServer()
    leader = SimStore(server)
    archive = Archive(
        store=SimStore(server), policies=PolicyBook(Policy()), unreadable=UnreadablePools()
    )
    await leader.fence(term=1)
    await leader.adopt("p", layout_of(1), term=1)
    hold = Hold(paused="ann: night")
    await leader.add_audit("p", AN_ORDER, hold=hold, after=0, term=1)
    await archive.refresh(elsewhere="ask a:7070")
    server.go_back(2)
    for _ in range(2):
        await archive.refresh(elsewhere="ask a:7070")
    assert archive.journals()["p"].hold == hold


async def test_an_archive_drops_a_pool_that_the_leader_forgot_and_no_other(store):
    archive = Archive(store=store, policies=PolicyBook(Policy()), unreadable=UnreadablePools())
    for name in ("gone", "kept"):
        await store.adopt(name, layout_of(1), term=0)
    await archive.refresh(elsewhere="ask a:7070")
    archive.keep(Pool("led until now", policies=PolicyBook(Policy()), memory=PoolMemory()))
    watched = archive.find("gone")
    await store.forget("gone", term=0)
    await archive.refresh(elsewhere="ask a:7070")
    assert archive.names() == ("kept", "led until now")
    assert watched.closed

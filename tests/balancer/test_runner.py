"""A pool's runner survives faults of its store and of our own code."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.trace import NoOpTracer

from equipoise.balancer import loop_share, pool_writes
from equipoise.balancer import runner as runner_module
from equipoise.balancer.clock import steady_clock, tick_s
from equipoise.balancer.errors import UnansweredError
from equipoise.balancer.loop_share import LoopBudget, LoopShares
from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.runner import PoolRunner
from equipoise.balancer.service.status import pool_status
from equipoise.balancer.store.store import StoreConflictError, StoreError, StoreFault, TermOverError
from equipoise.balancer.wave_turns import WaveTurns
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.load import Shift
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import ProposalRequest, propose
from equipoise.planning.redundancy import PERSISTENCE, judge_redundancy
from equipoise.planning.topology import ModelShape, Topology
from equipoise.policy.book import PolicyBook
from equipoise.pool.controller import PoolController
from equipoise.pool.effects import Propose
from equipoise.pool.health import Health
from equipoise.pool.records import PoolMemory
from equipoise.pool.requests import Pause
from equipoise.wire.balancer_messages import HeartbeatAck, JoinEpoch
from equipoise.wire.checks import MAX_RANKS
from tests.support.balancers import ThreadPlanner

WAIT_S = 120.0


class FaultyStore:
    """Fails as configured; other writes are discarded, which no test here needs."""

    def __init__(self) -> None:
        self.fault = None
        self.asked = asyncio.Event()
        self.done = []

    def __getattr__(self, name):
        async def write(*_args, **_kwargs):
            self.asked.set()
            if self.fault is not None:
                raise self.fault
            self.done.append(name)

        return write


@pytest.fixture
def store():
    return FaultyStore()


class Tenure:
    """A term that lasts until the test ends it."""

    def __init__(self) -> None:
        self.term = 7
        self.ended_by = None

    def holds(self):
        return self.ended_by is None

    def outranked(self, term):
        self.ended_by = term

    def start_over(self, reason):
        self.ended_by = reason


@pytest.fixture
def tenure():
    return Tenure()


@pytest.fixture
async def pool_runner(store, tenure):
    runner = PoolRunner(
        PoolController("tiny", policies=PolicyBook(Policy()), memory=PoolMemory(), term=1),
        store=store,
        tenure=tenure,
        planner=ThreadPlanner(),
        tracer=NoOpTracer(),
        wave_turns=WaveTurns(),
        loop_shares=LoopShares(),
        clock=steady_clock(),
    )
    task = asyncio.create_task(runner.run())
    yield runner
    assert not task.done(), "the pool still lives"
    task.cancel()


async def first_of(mailbox, kind):
    async with asyncio.timeout(WAIT_S):
        async for message in mailbox.messages():
            if isinstance(message, kind):
                return message
    raise AssertionError("the mailbox was closed")


async def until(runner, condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await runner.until_changed(runner.pool.revision)


@pytest.mark.parametrize(
    "fault", [StoreError("disk full: make room"), TypeError("a fault of ours")], ids=type
)
async def test_a_write_that_fails_degrades_the_pool_until_one_succeeds(
    pool_runner, store, hello_of, fault
):
    store.fault = fault
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    await until(pool_runner, lambda: pool_runner.pool.journal.store_fault)
    assert pool_runner.pool.diagnosis().health is Health.DEGRADED
    assert str(fault) in pool_runner.pool.diagnosis().reason
    store.fault = None
    assert (await first_of(mailbox, JoinEpoch)).epoch == 1
    await until(pool_runner, lambda: not pool_runner.pool.journal.store_fault)


async def test_each_log_line_of_a_pool_names_what_it_runs(pool_runner, store, hello_of, caplog):
    caplog.set_level("INFO")
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    await first_of(mailbox, JoinEpoch)
    store.fault = StoreError("disk full: make room")
    with pytest.raises(UnansweredError):
        await pool_runner.administer(Pause(), who="me", reason="", what="pause")
    (record,) = (one for one in caplog.records if "disk full" in one.getMessage())
    assert record.about == {"pool": "tiny", "epoch": 1, "generation": 1, "term": 7}
    pool_runner.leave("worker-0", mailbox, reason="it died")
    (record,) = (one for one in caplog.records if "it died" in one.getMessage())
    assert {**record.about}.items() >= {"worker": "worker-0", "rank": 0, "pool": "tiny"}.items()


async def test_streams_that_begin_and_end_without_end_do_not_flood_the_log(
    pool_runner, hello_of, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.setattr(pool_runner, "_clock", lambda: 0.0)
    for _ in range(3 * MAX_RANKS):
        mailbox = Mailbox()
        pool_runner.admit(hello_of(num_ranks=4), mailbox)
        pool_runner.leave("worker-0", mailbox, reason="its stream ended")
    lines = [one.getMessage() for one in caplog.records if "worker-0 " in one.getMessage()]
    assert len([one for one in lines if "connected from" in one]) == 2 * MAX_RANKS
    assert len([one for one in lines if "is gone" in one]) == 2 * MAX_RANKS
    monkeypatch.setattr(pool_runner, "_clock", lambda: 10.0)
    pool_runner.admit(hello_of(num_ranks=4), Mailbox())
    assert f"left out {2 * MAX_RANKS} lines about streams" in caplog.text


async def test_ticks_writes_and_workers_that_leave_are_charged_to_the_pool(
    pool_runner, hello_of, monkeypatch
):
    clock, calls, taken, ticked = [0.0], Counter(), [], asyncio.Event()
    monkeypatch.setattr(loop_share.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(LoopBudget, "take", lambda _budget, spent_s, *, now: taken.append(spent_s))

    def costly(method):
        call = getattr(pool_runner._controller, method)

        def measured(*args, **about):
            calls[method] += 1
            clock[0] += 1.0
            if method == "tick":
                ticked.set()
            return call(*args, **about)

        monkeypatch.setattr(pool_runner._controller, method, measured)

    for method in ("hello", "written", "tick", "lost"):
        costly(method)
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    await first_of(mailbox, JoinEpoch)
    await asyncio.wait_for(ticked.wait(), WAIT_S)
    pool_runner.leave("worker-0", mailbox, reason="it died")
    assert set(calls) == {"hello", "written", "tick", "lost"}
    assert sum(taken) == sum(calls.values())


async def test_ticks_that_take_long_are_fewer(pool_runner, monkeypatch):
    clock, latest, ticked = [0.0], [], asyncio.Event()
    monkeypatch.setattr(runner_module.time, "thread_time", lambda: clock[0])

    def next_s(_policy, *, latest_s):
        latest.append(latest_s)
        if len(latest) > 2:
            ticked.set()
        return 0.001

    def tick(*, now):
        clock[0] += 3.0
        return ()

    monkeypatch.setattr(runner_module, "tick_s", next_s)
    monkeypatch.setattr(pool_runner._controller, "tick", tick)
    await asyncio.wait_for(ticked.wait(), WAIT_S)
    assert latest[-1] == pytest.approx(3.0)
    usual_s = tick_s(Policy())
    assert tick_s(Policy(), latest_s=0.01 * usual_s) == usual_s
    assert tick_s(Policy(), latest_s=3.0) == pytest.approx(30.0), "a tenth of the loop's time"


async def test_a_heartbeat_is_answered_while_the_store_hangs(
    pool_runner, store, worker_of, hello_of, monkeypatch
):
    hangs = asyncio.Event()

    async def hang(*_args, **_kwargs):
        store.asked.set()
        await hangs.wait()

    monkeypatch.setattr(store, "adopt", hang, raising=False)
    worker, mailbox = worker_of(hello_of(num_ranks=1, slots_per_rank=32)), Mailbox()
    pool_runner.admit(worker.hello, mailbox)
    await asyncio.wait_for(store.asked.wait(), WAIT_S)
    pool_runner.receive("worker-0", mailbox, worker.heartbeat(sequence=9))
    assert (await first_of(mailbox, HeartbeatAck)).sequence == 9
    hangs.set()


async def test_a_store_that_does_not_answer_counts_as_failed(
    pool_runner, store, hello_of, monkeypatch
):
    monkeypatch.setattr(pool_writes, "WRITE_TIMEOUT_S", 0.01)

    async def hang(*_args, **_kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "adopt", hang, raising=False)
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), Mailbox())
    await until(pool_runner, lambda: pool_runner.pool.journal.store_fault)
    assert "did not answer within 0.01 s" in pool_runner.pool.diagnosis().reason


async def test_a_tick_that_fails_does_not_end_the_pool(pool_runner, hello_of, monkeypatch):
    broke = asyncio.Event()
    tick = pool_runner._controller.tick

    def break_once(*, now):
        if not broke.is_set():
            broke.set()
            raise RuntimeError("a fault of ours")
        return tick(now=now)

    monkeypatch.setattr(pool_runner._controller, "tick", break_once)
    await asyncio.wait_for(broke.wait(), WAIT_S)
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    assert (await first_of(mailbox, JoinEpoch)).rank == 0


async def test_a_request_of_an_ended_term_is_answered_at_once(pool_runner):
    pool_runner.close_streams()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UnansweredError, match="no longer leads"):
            await pool_runner.administer(Pause(), who="me", reason="", what="pause")


async def test_requests_behind_a_failed_write_fail_at_once(pool_runner, store):
    store.fault = StoreError("disk full: make room")
    asked = [
        asyncio.create_task(pool_runner.administer(Pause(), who=who, reason="", what="pause"))
        for who in ("me", "you")
    ]
    await asyncio.sleep(0)
    chains = [pool_runner._chains.get_nowait() for _ in asked]
    pool_runner._chains.put_nowait(tuple(effect for chain in chains for effect in chain))
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert ["disk full" in str(answer) for answer in answers] == [True, True]


async def test_the_clock_is_unix_time_that_does_not_run_backwards():
    clock = steady_clock()
    readings = [clock() for _ in range(100)]
    assert readings == sorted(readings)
    assert readings[0] > 1.7e9


async def test_every_push_carries_the_term(pool_runner, hello_of):
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    assert (await first_of(mailbox, JoinEpoch)).term == 7


@pytest.mark.parametrize(
    ("fault", "ended_by"),
    [
        (TermOverError(store="s", term=7, highest_term=9), 9),
        (
            StoreConflictError("2 must follow 1, but 5 is committed"),
            "2 must follow 1, but 5 is",
        ),
        (StoreError("it was emptied", fault=StoreFault.LOST), "it was emptied"),
    ],
)
async def test_a_store_with_a_higher_term_ends_the_term_and_nothing_is_pushed(
    pool_runner, store, tenure, hello_of, fault, ended_by
):
    store.fault = fault
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    await until(pool_runner, lambda: pool_runner.pool.journal.store_fault)
    assert str(tenure.ended_by).startswith(str(ended_by))
    assert mailbox_is_empty(mailbox)


async def test_what_was_written_in_time_is_not_pushed_after_the_term(
    pool_runner, store, tenure, hello_of, monkeypatch
):
    writing, may_end = asyncio.Event(), asyncio.Event()

    async def slow(*_args, **_kwargs):
        writing.set()
        await may_end.wait()

    monkeypatch.setattr(store, "put_membership", slow, raising=False)
    mailbox = Mailbox()
    pool_runner.admit(hello_of(num_ranks=1, slots_per_rank=32), mailbox)
    await asyncio.wait_for(writing.wait(), WAIT_S)
    revision = pool_runner.pool.revision
    tenure.start_over("this process was paused, say")
    may_end.set()
    await until(pool_runner, lambda: pool_runner.pool.revision != revision)
    assert not pool_runner.leads
    assert mailbox_is_empty(mailbox)


@pytest.mark.parametrize("leads_on", [True, False])
async def test_a_plan_that_is_ready_after_the_term_is_neither_written_nor_pushed(
    serving_harness, store, tenure, skewed, leads_on
):
    harness, planning, may_end = serving_harness, asyncio.Event(), asyncio.Event()
    runner = PoolRunner(
        harness.controller,
        store=store,
        tenure=tenure,
        planner=ThreadPlanner(),
        tracer=NoOpTracer(),
        wave_turns=WaveTurns(),
        loop_shares=LoopShares(),
        clock=lambda: harness.now,
    )

    async def slow(request):
        planning.set()
        await may_end.wait()
        return propose(request)

    runner._planning.propose = slow
    harness.now += harness.pool.policy.values.interval_s
    for worker in harness.ranks:
        worker.serve_traffic(10 * skewed(1))
        harness.say(worker, worker.report())
    task = asyncio.create_task(runner.run())
    await asyncio.wait_for(planning.wait(), WAIT_S)
    if not leads_on:
        tenure.start_over("the lease ran out meanwhile")
    may_end.set()
    await until(runner, lambda: not runner.pool.decisions.is_proposing)
    assert runner.pool.rollouts.current is not None, "the plan itself is good"
    if leads_on:
        await until(runner, lambda: "add_decision" in store.done)
    await until(runner, runner._chains.empty)
    assert ("put_proposed" in store.done) == leads_on
    assert "add_decision" in store.done or not leads_on
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def mailbox_is_empty(mailbox):
    return not mailbox._waiting


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 0.1),
        ({"heartbeat_interval_s": 4.0, "report_interval_s": 10.0, "report_timeout_s": 60.0}, 0.4),
        ({"heartbeat_interval_s": 60.0, "report_interval_s": 60.0, "report_timeout_s": 300.0}, 0.5),
        ({"interval_s": 0.05}, 0.1),
    ],
)
def test_the_clock_is_looked_at_as_often_as_the_shortest_bound_of_a_policy_needs(changes, seconds):
    assert tick_s(Policy(**changes)) == pytest.approx(seconds)


async def test_status_says_that_redundancy_is_wasted_once_several_plans_have_found_it(
    pool_runner, monkeypatch
):
    request = ProposalRequest(
        current=contiguous_layout(num_layers=3, num_experts=8, num_ranks=4, slots_per_rank=3),
        average=np.ones((3, 8)),
        window=np.ones((3, 8)),
        shift=Shift(detected=False, distance=0.0, noise=0.0, reason="no shift"),
        model=ModelShape(num_layers=3, num_experts=8, num_groups=4, expert_bytes=1000),
        topology=Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=3),
        policy=Policy(),
        first_generation=2,
        now=0.0,
        last_switch_s=None,
    )
    found = judge_redundancy(
        request.average,
        samples=None,
        model=request.model,
        topology=request.topology,
        policy=request.policy,
    )
    made = replace(propose(request), redundancy=found)

    async def planned(_):
        return made

    monkeypatch.setattr(pool_runner._planning, "propose", planned)
    for time in range(1, PERSISTENCE + 1):
        await pool_runner._plan(Propose(request=request))
        status = pool_status(pool_runner.pool, now=0.0, redundancy=pool_runner.redundancy)
        assert status.HasField("redundancy") == (time == PERSISTENCE)
    assert (status.redundancy.kind, status.redundancy.present) == ("wasted", 4)
    assert status.redundancy.reason == found.reason

"""Plans in processes of their own: the same plans, and none is left of those that are abandoned."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.balancer.planner import process as process_module
from equipoise.balancer.planner import processes as processes_module
from equipoise.balancer.planner.planning import PlannerDiedError, Planning, PlanTimeoutError
from equipoise.balancer.planner.processes import NUM_AHEAD, PlannerProcesses
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.load import Shift
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import ProposalRequest, propose
from equipoise.planning.redundancy import RedundancyKind
from equipoise.planning.topology import ModelShape, Topology
from tests.support.forked_commands import forked_planners

WAIT_S = 60.0


@pytest.fixture
def request_of_four_ranks():
    load = np.random.default_rng(1).gamma(0.5, 1000.0, size=(3, 8))
    return ProposalRequest(
        current=contiguous_layout(num_layers=3, num_experts=8, num_ranks=4, slots_per_rank=3),
        average=load,
        window=load,
        shift=Shift(detected=False, distance=0.0, noise=0.0, reason="no shift"),
        model=ModelShape(num_layers=3, num_experts=8, num_groups=4, expert_bytes=1000),
        topology=Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=3),
        policy=Policy(),
        first_generation=2,
        now=0.0,
        last_switch_s=None,
    )


@pytest.fixture
def forked():
    """Fork the processes that plan, for most tests: executing one takes two seconds of CPU."""
    with forked_planners():
        yield


@pytest.fixture
def children(forked):
    """List the processes that a test started, including ended ones that were not waited for."""
    before = set(all_children())
    return lambda: [pid for pid in all_children() if pid not in before]


@pytest.fixture
async def planner(children, monkeypatch):
    """One that makes one plan at a time, as on two CPUs."""
    monkeypatch.setattr(processes_module, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(processes_module, "MAX_PROCESSES", 2)
    async with PlannerProcesses() as planner:
        # On a machine that is busy a start may take longer than a turn, after which there are two.
        await planner.start()
        yield planner
    gone(*children())


def made_by(planner, request, *, pool="tiny", begins=lambda: None):
    """A plan that is being made."""
    return asyncio.create_task(planner.propose(request, pool=pool, begins=begins))


def gone(*pids):
    """Wait until nothing is left of these processes: their last caller reaps them."""
    until_s = time.monotonic() + WAIT_S
    while set(pids) & set(all_children()):
        assert time.monotonic() < until_s, "a process is left behind"
        time.sleep(0.01)


def all_children():
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return sorted(map(int, " ".join(lists).split()))


async def test_a_process_plans_as_this_one_would(request_of_four_ranks):
    expected = propose(request_of_four_ranks)
    async with PlannerProcesses() as planner:
        made = await made_by(planner, request_of_four_ranks)
    assert made.request is request_of_four_ranks
    assert made.verdict == expected.verdict
    assert made.verdict.accepted
    np.testing.assert_array_equal(made.plan.expert_of_slot, expected.plan.expert_of_slot)
    assert [wave.digest for wave in made.waves] == [wave.digest for wave in expected.waves]


async def test_a_process_judges_redundancy_beside_the_plan(planner, request_of_four_ranks):
    even = replace(request_of_four_ranks, average=np.ones((3, 8)))
    made = await made_by(planner, even)
    assert made.redundancy.kind is RedundancyKind.WASTED
    assert (made.redundancy.present, made.redundancy.advised) == (4, 0)
    few = await made_by(planner, replace(even, samples=10.0))
    assert few.redundancy is None


async def test_a_process_that_is_idle_is_used_again(planner, request_of_four_ranks, children):
    await made_by(planner, request_of_four_ranks)
    await made_by(planner, request_of_four_ranks, pool="another")
    assert len(children()) == 1


async def test_what_the_planner_raises_is_raised_here_and_harms_no_other_plan(
    planner, request_of_four_ranks, children
):
    broken = replace(request_of_four_ranks, average=np.zeros((2, 5)))
    with pytest.raises(AssertionError) as here:
        propose(broken)
    with pytest.raises(AssertionError) as there:
        await made_by(planner, broken)
    assert str(there.value) == str(here.value)
    assert "in propose" in "".join(there.value.__notes__), "the place where it was raised is shown"
    assert (await made_by(planner, request_of_four_ranks)).plan is not None
    assert len(children()) == 1


async def test_many_plans_are_made_in_order_by_few_processes(
    planner, request_of_four_ranks, children
):
    begun = []
    made = await asyncio.gather(
        *(
            made_by(
                planner, request_of_four_ranks, begins=lambda number=number: begun.append(number)
            )
            for number in range(5 * (1 + NUM_AHEAD))
        )
    )
    assert len({wave.digest for one in made for wave in one.waves}) == len(made[0].waves)
    assert len(children()) == 1
    assert begun == sorted(begun)
    assert len(begun) == len(made)


async def test_a_plan_that_takes_too_long_ends_with_its_process(
    planner, request_of_four_ranks, children
):
    planning = Planning("tiny", planner=planner)
    await planning.propose(request_of_four_ranks)
    (stuck,) = children()
    os.kill(stuck, signal.SIGSTOP)
    soon = replace(request_of_four_ranks, policy=Policy(plan_timeout_s=0.1))
    long = asyncio.create_task(planning.propose(soon))
    behind = asyncio.create_task(planning.propose(request_of_four_ranks))
    with pytest.raises(PlanTimeoutError, match=r"timed out after 0\.1 s"):
        await long
    await asyncio.to_thread(gone, stuck)
    assert (await behind).verdict.accepted, "what waited behind it is made by another process"


async def test_the_time_of_a_plan_begins_with_it(planner, request_of_four_ranks, children):
    await made_by(planner, request_of_four_ranks)
    (stopped,) = children()
    os.kill(stopped, signal.SIGSTOP)
    begun = []
    plans = [
        made_by(planner, request_of_four_ranks, begins=lambda number=number: begun.append(number))
        for number in range(3)
    ]
    async with asyncio.timeout(WAIT_S):
        while not begun:  # noqa: ASYNC110 - a list sends no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert begun == [0], "the others wait for it"
    os.kill(stopped, signal.SIGCONT)
    await asyncio.gather(*plans)
    assert begun == [0, 1, 2]


async def test_plans_queued_behind_a_long_one_move_to_another_process(
    planner, request_of_four_ranks, children, monkeypatch
):
    await made_by(planner, request_of_four_ranks)
    (busy,) = children()
    os.kill(busy, signal.SIGSTOP)
    monkeypatch.setattr(process_module, "TURN_S", 0.05)
    long = made_by(planner, request_of_four_ranks)
    await asyncio.sleep(0)
    monkeypatch.setattr(process_module, "TURN_S", WAIT_S)
    others = [made_by(planner, request_of_four_ranks) for _ in range(NUM_AHEAD + 2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*others)
    assert not long.done()
    os.kill(busy, signal.SIGCONT)
    assert (await long).verdict.accepted
    assert (await made_by(planner, request_of_four_ranks)).verdict.accepted


async def test_a_cancelled_waiter_does_not_delay_the_others(
    planner, request_of_four_ranks, children
):
    await made_by(planner, request_of_four_ranks)
    (busy,) = children()
    os.kill(busy, signal.SIGSTOP)
    plans = [made_by(planner, request_of_four_ranks) for _ in range(NUM_AHEAD + 3)]
    await asyncio.sleep(0)
    abandoned = plans[2], plans[-1]  # One that a process has, and one that none has yet.
    for plan in abandoned:
        plan.cancel()
    os.kill(busy, signal.SIGCONT)
    made = await asyncio.gather(*plans, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in made] == [
        plan in abandoned for plan in plans
    ]
    assert children() == [busy]


async def test_a_process_that_is_killed_costs_one_plan(planner, request_of_four_ranks, children):
    await made_by(planner, request_of_four_ranks)
    (victim,) = children()
    os.kill(victim, signal.SIGSTOP)
    plan, behind = (made_by(planner, request_of_four_ranks) for _ in range(2))
    await asyncio.sleep(0)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(PlannerDiedError, match=rf"process {victim} .* status -9"):
        await plan
    assert (await behind).verdict.accepted


async def test_a_process_that_is_killed_while_it_is_idle_costs_none(
    planner, request_of_four_ranks, children
):
    await made_by(planner, request_of_four_ranks)
    (victim,) = children()
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while victim in children():  # noqa: ASYNC110 - the system sends no event
            await asyncio.sleep(0.01)
    assert (await made_by(planner, request_of_four_ranks)).verdict.accepted


async def test_as_many_processes_plan_at_once_as_may(
    planner, request_of_four_ranks, children, monkeypatch
):
    monkeypatch.setattr(processes_module, "MAX_AT_ONCE", 2)
    (busy,) = children()
    os.kill(busy, signal.SIGSTOP)
    stuck, other = (made_by(planner, request_of_four_ranks) for _ in range(2))
    assert (await other).verdict.accepted
    os.kill(busy, signal.SIGCONT)
    assert (await stuck).verdict.accepted
    assert len(children()) == 2


async def test_a_plan_that_comes_back_to_the_process_that_made_it_unheard_is_made(
    planner, request_of_four_ranks, children
):
    (process,) = planner._processes
    os.kill(process.pid, signal.SIGSTOP)
    plans = [made_by(planner, request_of_four_ranks) for _ in range(3)]
    await asyncio.sleep(0)
    back = process.withdraw_waiting()
    for asked in back:
        process.ask(asked)
    os.kill(process.pid, signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        assert all(made.verdict.accepted for made in await asyncio.gather(*plans))


async def test_where_no_process_can_be_started_each_plan_fails_for_itself(
    request_of_four_ranks, monkeypatch
):
    def none_left(*_, **__):
        raise OSError(24, "Too many open files")

    async with PlannerProcesses() as planner:
        with monkeypatch.context() as broken:
            broken.setattr(process_module.subprocess, "Popen", none_left)
            for _ in range(2):
                with pytest.raises(PlannerDiedError, match=r"cannot start .* Too many open"):
                    await made_by(planner, request_of_four_ranks)
        assert (await made_by(planner, request_of_four_ranks)).verdict.accepted


async def test_one_is_ready_before_the_first_plan(planner, request_of_four_ranks, children):
    (ready,) = children()
    assert (await made_by(planner, request_of_four_ranks)).verdict.accepted
    assert children() == [ready]


async def test_one_that_is_not_ready_in_time_is_ended(
    planner, request_of_four_ranks, children, monkeypatch
):
    ready = children()
    monkeypatch.setattr(processes_module, "START_TIMEOUT_S", 0.001)
    with pytest.raises(PlannerDiedError, match=r"was not ready within 0\.001 s and was killed"):
        await planner.start()
    async with asyncio.timeout(WAIT_S):
        while children() != ready:  # noqa: ASYNC110 - the system sends no event
            await asyncio.sleep(0.01)
    assert (await made_by(planner, request_of_four_ranks)).verdict.accepted


async def test_one_that_cannot_start_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(process_module, "PROGRAM", "equipoise.balancer.no_planner")
    async with PlannerProcesses() as planner:
        with pytest.raises(PlannerDiedError, match="exited with status 1"):
            await planner.start()
    assert "no_planner" in capfd.readouterr().err


async def test_an_invalid_request_ends_the_process_with_a_message(capfd):
    async with PlannerProcesses() as planner:
        await planner.start()
        (process,) = planner._processes
        process._writer.write(b"of another release, and long enough")
        process._writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            while not process.ended:  # noqa: ASYNC110 - it tells its owner only
                await asyncio.sleep(0.01)
    assert "status 1" in str(process.died())
    assert "Error" in capfd.readouterr().err


async def test_it_ends_when_the_balancer_is_gone_and_not_on_ctrl_c(
    planner, request_of_four_ranks, children
):
    await made_by(planner, request_of_four_ranks)
    (child,) = children()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, number)
    assert (await made_by(planner, request_of_four_ranks)).verdict.accepted
    assert children() == [child]
    planner._processes[0]._writer.close()
    await asyncio.to_thread(gone, child)

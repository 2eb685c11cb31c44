"""Plans in processes of their own: the same plans, and none is left of those that are given up."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.balancer.planner.planning import PlannerDiedError, Planning, PlanTimeoutError
from equipoise.balancer.planner.processes import PlannerProcesses
from equipoise.balancer.planner.proposal import ProposalRequest, propose
from equipoise.balancer.planner.turns import MAX_AT_ONCE, PlanningTurns
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.load import Shift
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape, Topology

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
def children():
    """Tells the processes that a test started, those included that ended and nobody waited for."""
    before = set(all_children())
    return lambda: [pid for pid in all_children() if pid not in before]


@pytest.fixture
def planner(children):
    planner = PlannerProcesses()
    yield planner
    planner.stop()
    gone(*children())


def gone(*pids):
    """Wait until nothing is left of these processes: whoever asked one last takes its end in."""
    until_s = time.monotonic() + WAIT_S
    while set(pids) & set(all_children()):
        assert time.monotonic() < until_s, "a process is left behind"
        time.sleep(0.01)


def all_children():
    told = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return sorted(map(int, " ".join(told).split()))


async def test_a_process_plans_as_this_one_would(planner, request_of_four_ranks, children):
    expected = propose(request_of_four_ranks)
    made = await planner.propose(request_of_four_ranks, pool="tiny")
    assert made.request is request_of_four_ranks
    assert made.verdict == expected.verdict
    assert made.verdict.accepted
    np.testing.assert_array_equal(made.plan.expert_of_slot, expected.plan.expert_of_slot)
    assert [wave.digest for wave in made.waves] == [wave.digest for wave in expected.waves]
    await planner.propose(request_of_four_ranks, pool="another")
    assert len(children()) == 1, "one that is idle is used again"


async def test_what_the_planner_raises_is_raised_here_and_harms_no_other_plan(
    planner, request_of_four_ranks, children
):
    broken = replace(request_of_four_ranks, average=np.zeros((2, 5)))
    with pytest.raises(AssertionError) as here:
        propose(broken)
    with pytest.raises(AssertionError) as there:
        await planner.propose(broken, pool="broken")
    assert str(there.value) == str(here.value)
    assert "in propose" in "".join(there.value.__notes__), "where it was raised is told"
    assert (await planner.propose(request_of_four_ranks, pool="tiny")).plan is not None
    assert len(children()) == 1


async def test_as_many_plans_as_are_asked_for_are_made_at_once_and_few_processes_stay(
    planner, request_of_four_ranks, children
):
    asked = [planner.propose(request_of_four_ranks, pool="tiny") for _ in range(MAX_AT_ONCE + 1)]
    made = await asyncio.gather(*asked)
    assert len({wave.digest for one in made for wave in one.waves}) == len(made[0].waves)
    assert len(children()) == MAX_AT_ONCE


async def test_a_plan_that_takes_too_long_ends_with_its_process(
    planner, request_of_four_ranks, children
):
    planning = Planning("tiny", planner=planner, turns=PlanningTurns())
    await planning.propose(request_of_four_ranks)
    (stuck,) = children()
    os.kill(stuck, signal.SIGSTOP)
    soon = replace(request_of_four_ranks, policy=Policy(plan_timeout_s=0.1))
    with pytest.raises(PlanTimeoutError, match=r"given up after 0\.1 s"):
        await planning.propose(soon)
    await asyncio.to_thread(gone, stuck)
    assert (await planning.propose(request_of_four_ranks)).verdict.accepted


async def test_a_process_that_is_killed_costs_one_plan(planner, request_of_four_ranks, children):
    await planner.propose(request_of_four_ranks, pool="tiny")
    (victim,) = children()
    os.kill(victim, signal.SIGSTOP)
    plan = asyncio.create_task(planner.propose(request_of_four_ranks, pool="tiny"))
    await asyncio.sleep(0)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(PlannerDiedError, match=rf"process {victim}, .* status -9"):
        await plan
    assert (await planner.propose(request_of_four_ranks, pool="tiny")).verdict.accepted


async def test_a_process_that_is_killed_while_it_is_idle_costs_none(
    planner, request_of_four_ranks, children
):
    await planner.propose(request_of_four_ranks, pool="tiny")
    (victim,) = children()
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while planner._idle[0].is_alive:  # noqa: ASYNC110 - the system tells nobody
            await asyncio.sleep(0.01)
    assert (await planner.propose(request_of_four_ranks, pool="tiny")).verdict.accepted


async def test_it_is_ready_before_the_first_plan_and_no_more_are_started_than_may_be(
    planner, request_of_four_ranks, children
):
    done = []
    await asyncio.to_thread(planner.start, meanwhile=lambda: done.append("meanwhile"))
    (ready,) = children()
    assert done == ["meanwhile"]
    planner._free = asyncio.Semaphore(1)
    os.kill(ready, signal.SIGSTOP)
    stuck, waiting = (
        asyncio.create_task(planner.propose(request_of_four_ranks, pool=pool))
        for pool in ("stuck", "waiting")
    )
    await asyncio.sleep(0.1)
    assert children() == [ready]
    stuck.cancel()
    assert (await waiting).verdict.accepted
    await asyncio.to_thread(gone, ready)


async def test_what_is_no_request_ends_the_process_with_a_word(planner, capfd):
    await asyncio.to_thread(planner.start, meanwhile=lambda: None)
    process = planner._idle.pop()
    process._connection.send_bytes(b"of another release")
    with pytest.raises(PlannerDiedError, match="ended with status 1"):
        await asyncio.to_thread(process.ask, None)
    assert "UnpicklingError" in capfd.readouterr().err


async def test_it_ends_when_the_balancer_is_gone_and_not_on_ctrl_c(
    planner, request_of_four_ranks, children
):
    await planner.propose(request_of_four_ranks, pool="tiny")
    (child,) = children()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, number)
    assert (await planner.propose(request_of_four_ranks, pool="tiny")).verdict.accepted
    assert children() == [child]
    process = planner._idle.pop()
    process._connection.close()
    assert process._process.wait(timeout=WAIT_S) == 0

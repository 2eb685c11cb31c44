"""Turns of plans: few at once, in order, and nobody keeps one for ever."""

import asyncio
import os

import pytest

from equipoise.balancer.planner import turns as turns_module
from equipoise.balancer.planner.turns import MAX_AT_ONCE, PlanningTurns, num_at_once

WAIT_S = 30.0


async def test_no_more_plans_are_computed_at_once_than_there_are_turns():
    turns, under_way, most = PlanningTurns(), 0, 0

    async def plan():
        nonlocal under_way, most
        async with turns.taken():
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(plan() for _ in range(20)))
    assert most == MAX_AT_ONCE


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", 4),
        ("300000 100000", 2),
        ("50000 100000", 1),
        ("not a quota", 4),
        (None, 4),
    ],
)
def test_a_container_computes_no_more_plans_than_its_part_of_a_large_machine(
    cpu_max, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    path = tmp_path / "cpu.max"
    if cpu_max is not None:
        path.write_text(f"{cpu_max}\n")
    assert num_at_once(path) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7})
    assert num_at_once(path) == 1


async def test_plans_that_never_end_hold_up_the_others_for_a_turn_only(monkeypatch):
    monkeypatch.setattr(turns_module, "TURN_S", 0.01)
    turns, never = PlanningTurns(), asyncio.Event()

    async def hang():
        async with turns.taken():
            await never.wait()

    stuck = [asyncio.create_task(hang()) for _ in range(3 * MAX_AT_ONCE)]
    async with asyncio.timeout(WAIT_S), turns.taken():
        pass
    never.set()
    await asyncio.gather(*stuck)
    # Turns that were taken back are not given back once more.
    most = [asyncio.create_task(hang()) for _ in range(MAX_AT_ONCE + 1)]
    never.clear()
    await asyncio.sleep(0)
    assert turns._free.locked()
    never.set()
    await asyncio.gather(*most)


async def test_who_gives_up_waiting_loses_no_turn():
    turns, never = PlanningTurns(), asyncio.Event()

    async def hang():
        async with turns.taken():
            await never.wait()

    holding = [asyncio.create_task(hang()) for _ in range(MAX_AT_ONCE)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(hang())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    never.set()
    await asyncio.gather(*holding)
    async with asyncio.timeout(WAIT_S), turns.taken(), turns.taken():
        assert turns._free.locked()

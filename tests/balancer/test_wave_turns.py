"""Waves of many pools: all begin before one continues, and workers' messages come first."""

import asyncio

from equipoise.balancer import wave_turns as wave_turns_module
from equipoise.balancer.wave_turns import FIRST_LAG, LAG_S, WaveTurns
from equipoise.planning.policy import Policy

WAIT_S = 30.0
HEARTBEAT_S = 2.0
POLICY = Policy(heartbeat_interval_s=HEARTBEAT_S, stage_timeout_s=4 * WAIT_S)


async def go(turns, pool, went, *, num_ranks=1, is_first=False, is_wanted=lambda: True):
    may_go = await turns.turn(
        pool,
        num_ranks=num_ranks,
        is_first=is_first,
        policy=POLICY,
        is_wanted=is_wanted,
    )
    if may_go:
        went.append(pool)


def hold(monkeypatch, hold_s):
    """Have waves wait that long for each rank while messages lag."""
    for name in ("RANK_HOLD_S", "BEHIND_RANK_HOLD_S", "MIN_HOLD_S", "MAX_HOLD_S"):
        monkeypatch.setattr(wave_turns_module, name, hold_s)


async def test_the_first_wave_goes_at_once_however_messages_lag(monkeypatch):
    hold(monkeypatch, 2 * WAIT_S)
    turns, went = WaveTurns(), []
    turns.note_lag(2 * LAG_S)
    async with asyncio.timeout(WAIT_S):
        await go(turns, "alone", went)
    assert went == ["alone"]


async def test_a_wave_that_is_over_takes_no_turn():
    turns, went = WaveTurns(), []
    turns.note_lag(2 * LAG_S)
    async with asyncio.timeout(WAIT_S):
        over = (go(turns, f"over-{number}", went, is_wanted=lambda: False) for number in range(500))
        await asyncio.gather(*over, go(turns, "wanted", went))
    assert went == ["wanted"]


async def test_all_pools_begin_before_one_continues():
    turns, went = WaveTurns(), []
    async with asyncio.timeout(WAIT_S):
        await go(turns, "early", went)
        await asyncio.gather(
            *(go(turns, pool, went) for pool in ("early", "late", "later", "latest"))
        )
        assert went == ["early", "late", "later", "latest", "early"]
        await asyncio.gather(*(go(turns, pool, went) for pool in ("late", "early", "new")))
    assert went[5:] == ["new", "late", "early"]


async def test_plans_begin_before_others_continue_although_messages_lag(monkeypatch):
    hold(monkeypatch, WAIT_S)
    turns, went = WaveTurns(), []
    turns.note_lag((LAG_S + FIRST_LAG * HEARTBEAT_S) / 2)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        await go(turns, "early", went)
        for pool, is_first in (("early", False), ("late", False), ("new", True), ("newer", True)):
            tasks.create_task(go(turns, pool, went, is_first=is_first))
        while len(went) < 3:  # noqa: ASYNC110 - a list sends no event
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert went == ["early", "new", "newer"]
        turns.note_lag(0.0)
    assert went[3:] == ["late", "early"]


async def test_other_waves_wait_while_requested_plans_are_made(monkeypatch):
    hold(monkeypatch, WAIT_S)
    turns, went = WaveTurns(), []
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with turns.expecting():
            await go(turns, "early", went)
            for pool in ("early", "late"):
                tasks.create_task(go(turns, pool, went))
            await asyncio.sleep(0.05)
            assert went == ["early"]
            await go(turns, "ordered", went, is_first=True)
    assert went == ["early", "ordered", "late", "early"]


async def test_none_goes_while_messages_are_long_under_way(monkeypatch):
    hold(monkeypatch, WAIT_S)
    turns, went = WaveTurns(), []
    turns.note_lag(2 * LAG_S)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        pools = [tasks.create_task(go(turns, f"pool-{number}", went)) for number in range(5)]
        await asyncio.sleep(10 * LAG_S)
        assert len(went) == 1, "the first began before it could be seen"
        turns.note_lag(LAG_S / 2)
        await asyncio.wait(pools)
    assert len(went) == 5


async def test_after_a_wave_to_many_ranks_the_next_one_waits_the_longer(monkeypatch):
    hold(monkeypatch, 0.001)
    monkeypatch.setattr(wave_turns_module, "MAX_HOLD_S", 0.2)
    turns, went = WaveTurns(), []
    turns.note_lag(2 * FIRST_LAG * HEARTBEAT_S)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        began_s = loop.time()
        await go(turns, "large", went, num_ranks=10**9)
        await go(turns, "small", went)
    assert loop.time() - began_s >= 0.2


async def test_a_wave_waits_for_requested_plans_for_a_fraction_of_its_timeout_only(monkeypatch):
    hold(monkeypatch, WAIT_S)
    monkeypatch.setattr(wave_turns_module, "BEHIND_TIMEOUT", 0.1 / POLICY.stage_timeout_s)
    turns, went = WaveTurns(), []
    async with asyncio.timeout(WAIT_S):
        with turns.expecting():
            await go(turns, "early", went)
            await go(turns, "late", went)
    assert went == ["early", "late"]


async def test_however_it_lags_all_have_their_turn_but_those_that_are_gone(monkeypatch):
    hold(monkeypatch, 0.01)
    turns, went = WaveTurns(), []
    turns.note_lag(2 * LAG_S)
    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(go(turns, "first", went))
        gone = asyncio.create_task(go(turns, "gone", went))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(first, *(go(turns, f"pool-{number}", went) for number in range(3)))
    assert went == ["first", "pool-0", "pool-1", "pool-2"]

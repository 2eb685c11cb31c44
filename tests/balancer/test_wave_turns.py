"""Waves of many pools: all begin before one goes on, and hearing workers comes first."""

import asyncio
import time

from equipoise.balancer.pool import wave_turns as wave_turns_module
from equipoise.balancer.pool.wave_turns import LAG_S, WaveTurns

WAIT_S = 30.0


async def go(turns, pool, went):
    await turns.turn(pool)
    went.append(pool)


async def test_a_pool_alone_goes_at_once():
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            await WaveTurns().turn("alone")


async def test_all_pools_begin_before_one_goes_on():
    turns, went = WaveTurns(), []
    async with asyncio.timeout(WAIT_S):
        await go(turns, "early", went)
        await asyncio.gather(
            *(go(turns, pool, went) for pool in ("early", "late", "later", "latest"))
        )
        assert went == ["early", "late", "later", "latest", "early"]
        await asyncio.gather(*(go(turns, pool, went) for pool in ("late", "early", "new")))
    assert went[5:] == ["new", "late", "early"]


async def test_none_goes_while_the_event_loop_lags_behind():
    turns, went, is_busy = WaveTurns(), [], True

    async def keep_busy():
        while is_busy:
            time.sleep(2 * LAG_S)  # noqa: ASYNC251 - just that
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_busy())
        pools = [tasks.create_task(go(turns, f"pool-{number}", went)) for number in range(5)]
        await asyncio.sleep(10 * LAG_S)
        assert len(went) == 1, "the first began before it could be seen"
        is_busy = False
        await asyncio.wait(pools)
    assert len(went) == 5


async def test_nobody_waits_for_ever_and_who_gave_up_keeps_nobody(monkeypatch):
    monkeypatch.setattr(wave_turns_module, "MAX_WAIT_S", 0.05)
    monkeypatch.setattr(wave_turns_module, "LAG_S", -1.0)  # It never keeps up.
    turns, went = WaveTurns(), []
    async with asyncio.timeout(WAIT_S):
        gone = asyncio.create_task(go(turns, "gone", went))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*(go(turns, f"pool-{number}", went) for number in range(3)))
    assert sorted(went) == ["pool-0", "pool-1", "pool-2"]
    turns._letting.cancel()

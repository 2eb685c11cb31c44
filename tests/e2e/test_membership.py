"""Ranks die, hang, leave and join under load: how long tokens pause, and that none changes.

One pool goes through all of it, because starting its processes takes longer than the
faults. Each test leaves as many ranks as it found, but for the last.
"""

import os
import signal
import time

import pytest
import pytest_asyncio

from equipoise_api.v1 import status_pb2
from tests.support.real_pool import check_tokens, pool_of, under_load, undisturbed_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

RESUME_S = 10.0
"""The promised bound: tokens resume this long after a rank was lost."""

NUM_RANKS = 4


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_tokens()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory, undisturbed):
    names = [f"worker-{number}" for number in range(NUM_RANKS)]
    async with pool_of(*names, folder=tmp_path_factory.mktemp("pool")) as (pool, _):
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def before(pool):
    """The status of the pool while all its ranks serve, in the order of their ranks."""
    return await pool.until(
        lambda status: (
            status.health == status_pb2.POOL_HEALTH_SERVING
            and [rank.rank for rank in status.ranks] == list(range(NUM_RANKS))
        )
    )


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("lost_rank", [0, 2], ids=["rendezvous", "another"])
async def test_tokens_resume_soon_after_a_rank_is_lost_and_none_changes(
    pool, before, undisturbed, fault, lost_rank, record_property
):
    victim = before.ranks[lost_rank]
    names = _names(before)
    async with under_load(before) as traffic:
        await traffic.until_finished(3)
        lost_s = time.monotonic()
        traffic.remove(victim.address)
        if fault is signal.SIGKILL:
            await pool.fleet.stop(victim.worker, with_signal=fault)
        else:
            os.kill(pool.fleet.pid(victim.worker), fault)
        after = await pool.serving(*names - {victim.worker}, after_epoch=before.epoch)
        await traffic.until_finished(3)
        pause_s = traffic.longest_pause_s(since_s=lost_s, until_s=time.monotonic())
        reason = after.epochs[0].reason
        print(f"\n{victim.worker} {fault.name}: tokens paused for {pause_s:.2f} s; {reason}")
        record_property("pause_s", round(pause_s, 2))
        assert pause_s <= RESUME_S
        assert victim.worker in reason
        assert after.generation > before.generation

        joined_s = time.monotonic()
        if fault is signal.SIGSTOP:
            os.kill(pool.fleet.pid(victim.worker), signal.SIGCONT)
        else:
            await pool.start_worker(victim.worker)
        again = await pool.serving(*names, after_epoch=after.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=joined_s, until_s=time.monotonic())
        print(
            f"{victim.worker} joined: tokens paused for {pause_s:.2f} s; {again.epochs[0].reason}"
        )
        assert pause_s <= RESUME_S
    check_tokens(traffic, undisturbed)


async def test_a_pool_grows_beyond_its_first_size_and_a_stopping_rank_hands_over(
    pool, before, undisturbed
):
    async with under_load(before) as traffic:
        await traffic.until_finished(3)
        joined_s = time.monotonic()
        await pool.start_worker("worker-4")
        grown = await pool.serving(*_names(before), "worker-4", after_epoch=before.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=joined_s, until_s=time.monotonic())
        print(f"\nworker-4 joined: tokens paused for {pause_s:.2f} s; {grown.epochs[0].reason}")
        assert pause_s <= RESUME_S
        assert traffic.resent == 0, "no client had to resend"

        left_s = time.monotonic()
        leaving = grown.ranks[1]
        traffic.remove(leaving.address)
        assert await pool.fleet.stop(leaving.worker) == 0
        await pool.serving(*_names(grown) - {leaving.worker}, after_epoch=grown.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=left_s, until_s=time.monotonic())
        print(f"{leaving.worker} left: tokens paused for {pause_s:.2f} s")
        assert pause_s <= RESUME_S
    check_tokens(traffic, undisturbed)


async def test_too_few_slots_take_the_pool_down_until_a_rank_returns(pool, before, undisturbed):
    async with under_load(before) as traffic:
        await traffic.until_finished(3)
        for rank in before.ranks[2:]:
            traffic.remove(rank.address)
            await pool.fleet.stop(rank.worker, with_signal=signal.SIGKILL)
        down = await pool.until(lambda status: status.health == status_pb2.POOL_HEALTH_DOWN)
        left = [rank.worker for rank in before.ranks[:2]]
        reason = f"2 workers ({', '.join(sorted(left))}) with 24 slots cannot hold"
        assert reason in down.health_reason
        returning = before.ranks[2].worker
        await pool.start_worker(returning)
        await pool.serving(*left, returning, after_epoch=before.epoch)
        await traffic.until_finished(6)
    check_tokens(traffic, undisturbed)


def _names(status):
    return {rank.worker for rank in status.ranks}

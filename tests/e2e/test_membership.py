"""Ranks die, hang, leave and join under load: how long tokens pause, and that none changes."""

import os
import signal
import time

import pytest
from real_pool import check_tokens, pool_of, under_load, undisturbed_tokens

from equipoise_api.v1 import status_pb2

pytestmark = pytest.mark.e2e

RESUME_S = 10.0
"""What the project promises: tokens flow again this long after a rank was lost."""

NAMES = tuple(f"worker-{number}" for number in range(4))


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_tokens()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("victim", ["worker-0", "worker-2"], ids=["rendezvous", "another"])
async def test_tokens_flow_again_soon_after_a_rank_is_lost_and_none_changes(
    tmp_path, undisturbed, fault, victim, record_property
):
    async with pool_of(*NAMES, folder=tmp_path) as (pool, before), under_load(before) as traffic:
        await traffic.until_finished(3)
        addresses = {rank.worker: rank.address for rank in before.ranks}
        survivors = set(NAMES) - {victim}
        lost_s = time.monotonic()
        traffic.remove(addresses[victim])
        if fault is signal.SIGKILL:
            await pool.fleet.stop(victim, with_signal=fault)
        else:
            os.kill(pool.fleet.pid(victim), fault)
        after = await pool.serving(*survivors, after_epoch=before.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=lost_s, until_s=time.monotonic())
        reason = after.epochs[0].reason
        print(f"\n{victim} {fault.name}: tokens paused for {pause_s:.2f} s; {reason}")
        record_property("pause_s", round(pause_s, 2))
        assert pause_s <= RESUME_S
        assert victim in reason
        assert after.generation > before.generation

        if fault is signal.SIGSTOP:
            os.kill(pool.fleet.pid(victim), signal.SIGCONT)
        else:
            await pool.start_worker(victim)
        joined_s = time.monotonic()
        again = await pool.serving(*NAMES, after_epoch=after.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=joined_s, until_s=time.monotonic())
        print(f"{victim} joined: tokens paused for {pause_s:.2f} s; {again.epochs[0].reason}")
        assert pause_s <= RESUME_S
    check_tokens(traffic, undisturbed)


async def test_a_worker_that_is_asked_to_stop_hands_over_and_the_others_go_on(
    tmp_path, undisturbed
):
    async with pool_of(*NAMES, folder=tmp_path) as (pool, before), under_load(before) as traffic:
        await traffic.until_finished(3)
        left_s = time.monotonic()
        traffic.remove(next(rank.address for rank in before.ranks if rank.worker == "worker-1"))
        assert await pool.fleet.stop("worker-1") == 0
        await pool.serving(*set(NAMES) - {"worker-1"}, after_epoch=before.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=left_s, until_s=time.monotonic())
        print(f"\nworker-1 left: tokens paused for {pause_s:.2f} s")
        assert pause_s <= RESUME_S
    check_tokens(traffic, undisturbed)


async def test_too_few_slots_take_the_pool_down_until_a_rank_returns(tmp_path, undisturbed):
    async with pool_of(*NAMES, folder=tmp_path) as (pool, before), under_load(before) as traffic:
        await traffic.until_finished(3)
        for name in ("worker-2", "worker-3"):
            address = next(rank.address for rank in before.ranks if rank.worker == name)
            traffic.remove(address)
            await pool.fleet.stop(name, with_signal=signal.SIGKILL)
        down = await pool.until(lambda status: status.health == status_pb2.POOL_HEALTH_DOWN)
        assert "2 workers (worker-0, worker-1) with 24 slots cannot hold" in down.health_reason
        await pool.start_worker("worker-2")
        await pool.serving("worker-0", "worker-1", "worker-2", after_epoch=before.epoch)
        await traffic.until_finished(6)
    check_tokens(traffic, undisturbed)


async def test_a_pool_grows_beyond_what_it_began_with(tmp_path, undisturbed):
    async with pool_of(*NAMES, folder=tmp_path) as (pool, before), under_load(before) as traffic:
        await traffic.until_finished(3)
        await pool.start_worker("worker-4")
        joined_s = time.monotonic()
        after = await pool.serving(*NAMES, "worker-4", after_epoch=before.epoch)
        await traffic.until_finished(6)
        pause_s = traffic.longest_pause_s(since_s=joined_s, until_s=time.monotonic())
        print(f"\nworker-4 joined: tokens paused for {pause_s:.2f} s; {after.epochs[0].reason}")
        assert pause_s <= RESUME_S
        assert traffic.resent == 0, "nobody had to ask again"
    check_tokens(traffic, undisturbed)

"""The balancer dies in every state of a rollout, or the whole fleet dies at once."""

import asyncio
import signal
import statistics
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
import pytest_asyncio

from equipoise.cli.demo.fleet import FleetError
from equipoise.planning.rollout import State
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.support import doomed
from tests.support.real_pool import (
    BOUND_S,
    check_tokens,
    mirrored,
    pool_of,
    under_load,
    undisturbed_tokens,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

NAMES = ("worker-0", "worker-1")


@asynccontextmanager
async def asking(pool, stub):
    async with grpc.aio.insecure_channel(pool.address) as channel:
        yield stub(channel)


async def pin(pool, layout):
    """Pin the pool to a placement, as soon as a balancer leads.

    The balancer may die before it answers.
    """
    request = admin_pb2.PinRequest(reason="to be rolled out", layout=layout)
    async with asyncio.timeout(BOUND_S), asking(pool, admin_pb2_grpc.AdminStub) as admin:
        while True:
            try:
                return await admin.Pin(request, timeout=BOUND_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return None
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
            await asyncio.sleep(0.1)


async def average(pool):
    """The slow moving average, by layer and expert."""
    async with asking(pool, status_pb2_grpc.StatusStub) as status:
        loads = await status.GetLoads(
            status_pb2.GetLoadsRequest(), timeout=BOUND_S, wait_for_ready=True
        )
    return np.frombuffer(loads.slow_assignments_per_s, "<f8")


async def death(pool):
    """Wait until the balancer has died by itself."""
    with pytest.raises(FleetError, match="balancer exited unexpectedly with status -9"):
        async with asyncio.timeout(BOUND_S):
            await pool.fleet.watch()
    await pool.fleet.stop("balancer")


@pytest.fixture(scope="module")
def doom(tmp_path_factory):
    """The file that names the state in which the balancer dies."""
    return tmp_path_factory.mktemp("doom") / "doom"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory, doom):
    folder = tmp_path_factory.mktemp("pool")
    program = program_of(doom)
    async with pool_of(*NAMES, folder=folder, slots_per_rank=20, balancer=program) as (pool, _):
        yield pool


def program_of(doom):
    return doomed.__file__, str(doom)


async def test_a_restarted_fleet_keeps_its_layout_and_its_averages(pool, doom):
    before = await pool.serving(*NAMES)
    async with under_load(before):
        learned = await pool.until(lambda status: status.generation > before.generation)
    async with asking(pool, admin_pb2_grpc.AdminStub) as admin:
        await admin.Pause(
            admin_pb2.PauseRequest(reason="to be compared"), timeout=BOUND_S, wait_for_ready=True
        )
    learned = await pool.until(lambda status: not status.HasField("rollout"))
    layout, loads = await pool.layout(), await average(pool)
    for name in (*NAMES, "balancer"):
        await pool.fleet.stop(name, with_signal=signal.SIGKILL)
    await pool.start_balancer(program=program_of(doom))
    for name in NAMES:
        await pool.start_worker(name)
    after = await pool.serving(*NAMES, after_epoch=learned.epoch)
    assert after.generation >= learned.generation
    assert (await pool.layout()).expert_of_slot == layout.expert_of_slot
    assert np.corrcoef(await average(pool), loads)[0, 1] > 0.99
    async with asking(pool, admin_pb2_grpc.AdminStub) as admin:
        await admin.Resume(admin_pb2.ResumeRequest(reason="compared"), timeout=BOUND_S)


async def test_a_balancer_that_died_in_any_state_of_a_rollout_is_succeeded_by_one_that_ends_it(
    pool, doom
):
    undisturbed = undisturbed_tokens()
    first = await pool.serving(*NAMES)
    async with under_load(first) as traffic:
        # From here on only the pinned layout is rolled out, so the balancer dies of nothing else.
        await pin(pool, await pool.layout())
        pinned = await pool.until(
            lambda status: status.hold.at_pin and not status.HasField("rollout")
        )
        generation = pinned.generation
        for state in State:
            wanted = mirrored(await pool.layout())
            doom.write_text(state)
            await pin(pool, wanted)
            await death(pool)
            doom.write_text("")
            await traffic.until_finished(1)  # Requests do not wait for a balancer.
            await pool.start_balancer(program=program_of(doom))
            after = await pool.until(
                lambda status: (
                    status.health == status_pb2.POOL_HEALTH_SERVING
                    and status.hold.at_pin
                    and status.generation > generation  # noqa: B023 - asked within the turn
                    and not status.HasField("rollout")
                )
            )
            assert (await pool.layout()).expert_of_slot == wanted.expert_of_slot, state
            assert after.epoch == first.epoch, "the ranks went on"
            generation = after.generation
    check_tokens(traffic, undisturbed)


@pytest.mark.benchmark
async def test_no_token_is_late_because_the_balancer_died(tmp_path):
    async with (
        pool_of(*NAMES, folder=tmp_path, slots_per_rank=20) as (pool, first),
        under_load(first) as traffic,
    ):
        await traffic.until_finished(24)
        ratios = []
        # In turns, so that other load on the machine affects both.
        for _ in range(3):
            led_s = await late_gap_s(traffic)
            await pool.fleet.stop("balancer", with_signal=signal.SIGKILL)
            ratios.append(await late_gap_s(traffic) / led_s)
            await pool.start_balancer()
            await pool.serving(*NAMES)
    print(f"\n99th percentile between tokens, balancer killed to balancer there: {ratios}")
    assert statistics.median(ratios) <= 1.1


async def late_gap_s(traffic):
    """The 99th percentile of seconds between two tokens, over all clients, from now on."""
    begin = len(traffic.times)
    await traffic.until_finished(24)
    return float(np.percentile(np.diff(traffic.times[begin:]), 99))

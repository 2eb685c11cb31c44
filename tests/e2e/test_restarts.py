"""The whole fleet dies at once: what outlives it."""

import signal
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from real_pool import BOUND_S, pool_of, under_load

from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc

pytestmark = pytest.mark.e2e

NAMES = ("worker-0", "worker-1")


@asynccontextmanager
async def asking(pool, stub):
    async with grpc.aio.insecure_channel(pool.address) as channel:
        yield stub(channel)


async def average(pool):
    """The slow moving average, a number for every expert of every layer."""
    async with asking(pool, status_pb2_grpc.StatusStub) as status:
        loads = await status.GetLoads(
            status_pb2.GetLoadsRequest(), timeout=BOUND_S, wait_for_ready=True
        )
    return np.frombuffer(loads.slow_tokens_per_s, "<f8")


async def test_a_restarted_fleet_keeps_its_layout_and_its_averages(tmp_path):
    async with pool_of(*NAMES, folder=tmp_path, slots_per_rank=20) as (pool, before):
        async with under_load(before):
            learned = await pool.until(lambda status: status.generation > before.generation)
        async with asking(pool, admin_pb2_grpc.AdminStub) as admin:
            await admin.Pause(
                admin_pb2.PauseRequest(reason="to be compared"),
                timeout=BOUND_S,
                wait_for_ready=True,
            )
        learned = await pool.until(lambda status: not status.HasField("rollout"))
        layout, loads = await pool.layout(), await average(pool)
        for name in (*NAMES, "balancer"):
            await pool.fleet.stop(name, with_signal=signal.SIGKILL)
        await pool.start_balancer()
        for name in NAMES:
            await pool.start_worker(name)
        after = await pool.serving(*NAMES, after_epoch=learned.epoch)
        assert after.generation >= learned.generation
        assert (await pool.layout()).expert_of_slot == layout.expert_of_slot
        assert np.corrcoef(await average(pool), loads)[0, 1] > 0.99

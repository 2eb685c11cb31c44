"""Ranks draft with experts that are spread over all of them, and move: no token changes."""

import grpc
import numpy as np
import pytest

from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from equipoise_model.presets import TINY
from tests.support.real_pool import (
    BOUND_S,
    check_tokens,
    mirrored,
    pool_of,
    under_load,
    undisturbed_tokens,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NAMES = ("worker-0", "worker-1")


async def loads_of(pool):
    """Loads of the latest window, as soon as one with traffic has closed."""
    await pool.until(lambda status: status.window_assignments > 0)
    async with grpc.aio.insecure_channel(pool.address) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        loads = await stub.GetLoads(status_pb2.GetLoadsRequest(), timeout=BOUND_S)
    return np.frombuffer(loads.window_assignments).reshape(loads.num_layers, -1)


async def test_a_rollout_moves_the_draft_modules_experts_and_no_token_changes(tmp_path):
    # 20 of 32 experts a rank: neither could draft alone.
    async with pool_of(
        *NAMES, folder=tmp_path, slots_per_rank=20, arguments=("--speculate=1",)
    ) as (pool, first):
        held = await pool.layout()
        assert held.num_layers == TINY.num_moe_layers + 1
        async with under_load(first) as traffic:
            await traffic.until_finished(6)
            wanted = mirrored(held)
            async with grpc.aio.insecure_channel(pool.address) as channel:
                admin = admin_pb2_grpc.AdminStub(channel)
                request = admin_pb2.PinRequest(reason="to move every expert", layout=wanted)
                await admin.Pin(request, timeout=BOUND_S, wait_for_ready=True)
            after = await pool.until(
                lambda status: status.generation > first.generation and status.hold.at_pin
            )
            assert (await pool.layout()).expert_of_slot == wanted.expert_of_slot
            assert after.epoch == first.epoch, "no rank was lost"
            await traffic.until_finished(6)
            # Windows count what the module's experts receive: as many as any layer's if all draft.
            *layers, module = (await loads_of(pool)).sum(axis=1)
            assert 0.5 * min(layers) < module < 1.5 * max(layers)
            drafting = await pool.until(
                lambda status: all(rank.drafts_accepted > 0 for rank in status.ranks)
            )
            assert drafting.epoch == first.epoch
    check_tokens(traffic, undisturbed_tokens())

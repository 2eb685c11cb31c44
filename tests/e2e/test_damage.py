"""One worker's copy of the checkpoint is damaged: real processes, and tokens that do not change."""

import asyncio
import shutil

import numpy as np
import pytest

from equipoise.formats.packaged import packaged_checkpoint
from equipoise_api.v1 import status_pb2
from equipoise_model.checkpoint_manifest import MANIFEST
from tests.support.damaged_files import flip_bit
from tests.support.real_pool import (
    BOUND_S,
    check_tokens,
    pool_of,
    under_load,
    undisturbed_tokens,
)

pytestmark = pytest.mark.e2e

GOOD = ["worker-0", "worker-1", "worker-2"]
"""With 12 slots each they can hold all 32 experts."""


@pytest.fixture
def damaged(tmp_path):
    """A copy of the checkpoint with one flipped bit in each of 101 of its 128 experts."""
    folder = tmp_path / "damaged"
    shutil.copytree(packaged_checkpoint(), folder)
    for layer, expert in list(np.ndindex(4, 32))[:101]:
        flip_bit(folder, f"model.layers.{1 + layer}.mlp.experts.{expert}.up_proj.weight")
    return folder


async def test_one_damaged_copy_never_becomes_the_truth(damaged, tmp_path):
    undisturbed = undisturbed_tokens()
    async with pool_of(*GOOD, folder=tmp_path) as (pool, before), under_load(before) as traffic:
        # As downloaded: without a manifest, so that the worker computes one from what it has.
        good_manifest = (damaged / MANIFEST).read_bytes()
        (damaged / MANIFEST).unlink()
        await pool.start_worker("worker-3", f"--checkpoint={damaged}")
        status = await pool.until(lambda status: "worker-3 is quarantined" in status.health_reason)
        assert "its checkpoint is" in status.health_reason
        assert status.health == status_pb2.POOL_HEALTH_DEGRADED
        assert [rank.worker for rank in status.ranks] == GOOD
        decided = status.windows_closed
        status = await pool.until(lambda status: status.windows_closed > decided + 2)
        assert [rank.worker for rank in status.ranks] == GOOD
        await traffic.until_finished(6)
        await pool.fleet.stop("worker-3")

        # With the manifest that was published with it, it takes what is damaged from its peers.
        (damaged / MANIFEST).write_bytes(good_manifest)
        await pool.start_worker("worker-3", f"--checkpoint={damaged}")
        after = await pool.serving(*GOOD, "worker-3", after_epoch=before.epoch)
        assert after.health == status_pb2.POOL_HEALTH_SERVING
        await traffic.until_finished(12)
    check_tokens(traffic, undisturbed)


async def test_a_worker_that_finds_no_other_source_names_the_file_and_the_others_serve(
    damaged, tmp_path
):
    async with pool_of(*GOOD, folder=tmp_path) as (pool, before):
        flip_bit(damaged, "model.norm.weight")
        await pool.start_worker("worker-3", f"--checkpoint={damaged}")
        async with asyncio.timeout(BOUND_S):
            while "does not match the digest" not in pool.fleet.log_tail("worker-3"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        tail = pool.fleet.log_tail("worker-3")
        assert str(damaged / "model.safetensors") in tail
        assert "model.norm.weight does not match the digest" in tail
        await pool.fleet.stop("worker-3")
        status = await pool.serving(*GOOD)
        assert status.epoch == before.epoch

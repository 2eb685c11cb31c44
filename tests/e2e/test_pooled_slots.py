"""Real processes whose layers share places: from perLayer to pooled slots and back."""

import numpy as np
import pytest

from tests.support.real_pool import check_tokens, pool_of, under_load, undisturbed_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NAMES = ("worker-0", "worker-1", "worker-2", "worker-3")
NUM_PLACES = 40
"""Of 4 layers x 32 experts on 4 ranks: 8 experts more than each has to hold."""
NUM_SLOTS = 14

POLICY = """
apiVersion: equipoise.dev/v1alpha1
kind: BalancePolicy
defaults:
  planning:
    algorithm: global
    slots: {slots}
  judging:
    minGain: 0
    cooldown: 1s
"""


def slots_in_use(layout):
    """Slots in use by layer and rank, int64 [layers, ranks]."""
    table = np.frombuffer(layout.expert_of_slot, dtype="<i4").reshape(layout.num_layers, -1)
    used = (table >= 0).reshape(layout.num_layers, layout.num_ranks, -1).sum(axis=2)
    assert used.sum(axis=0).max() <= NUM_PLACES
    assert used.max() <= NUM_SLOTS
    return used


async def test_a_pool_goes_from_per_layer_to_pooled_slots_and_back_and_no_token_changes(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(slots="perLayer"))
    async with pool_of(
        *NAMES,
        folder=tmp_path,
        slots_per_rank=NUM_SLOTS,
        arguments=(f"--places={NUM_PLACES}",),
        balancer_arguments=(f"--policy={policy}",),
    ) as (pool, first):
        assert (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all()
        async with under_load(first) as traffic:
            await traffic.until_finished(6)
            generation = first.generation
            for slots, is_even in (("pooled", False), ("perLayer", True)):
                policy.write_text(POLICY.format(slots=slots))
                while (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all() != is_even:
                    later = await pool.until(
                        lambda status, least=generation: status.generation > least
                    )
                    generation = later.generation
                assert later.epoch == first.epoch, "no rank was lost"
                await traffic.until_finished(6)
    check_tokens(traffic, undisturbed_tokens())

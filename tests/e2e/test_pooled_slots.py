"""Real processes whose layers share places: from perLayer to pooled slots and back."""

import signal

import numpy as np
import pytest

from tests.support.real_pool import check_tokens, pool_of, under_load, undisturbed_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NAMES = ("worker-0", "worker-1", "worker-2", "worker-3")
NUM_PLACES = 44
"""Of 4 layers x 32 experts: three of four ranks can hold them."""
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


async def test_ranks_that_share_places_survive_a_killed_one_and_no_token_changes(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(slots="pooled"))
    places = f"--places={NUM_PLACES}"
    async with pool_of(
        *NAMES,
        folder=tmp_path,
        slots_per_rank=NUM_SLOTS,
        arguments=(places,),
        balancer_arguments=(f"--policy={policy}",),
    ) as (pool, first):
        victim = first.ranks[1]
        async with under_load(first) as traffic:
            await traffic.until_finished(3)
            later = first
            while (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all():
                later = await pool.until(
                    lambda status, least=later.generation: status.generation > least
                )
            traffic.remove(victim.address)
            await pool.fleet.stop(victim.worker, with_signal=signal.SIGKILL)
            rest = {rank.worker for rank in first.ranks} - {victim.worker}
            after = await pool.serving(*rest, after_epoch=first.epoch)
            slots_in_use(await pool.layout())
            await traffic.until_finished(3)
            await pool.start_worker(victim.worker, places)
            await pool.serving(*NAMES, after_epoch=after.epoch)
            slots_in_use(await pool.layout())
            await traffic.until_finished(3)
            later = await pool.serving(*NAMES, after_epoch=after.epoch)
            assert not later.quarantined
    check_tokens(traffic, undisturbed_tokens())

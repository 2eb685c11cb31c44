"""Layers that share places: slots may be empty, and outputs do not depend on where experts are."""

import numpy as np
import pytest
import torch

from equipoise_kernels.formats import GROUP, ScaleFormat
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import StagedExperts
from equipoise_model.fp8.experts import Fp8ExpertSlots
from equipoise_model.overlap import finish
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.experts import ExpertSlots
from equipoise_model.plain.router import Routing
from tests.support.small_models import MOE_LAYERS as CONFIG

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_SLOTS, NUM_PLACES = 3, 16, 4, 24, 56


def pooled_layout(seed):
    """Experts in random slots, int64 [layers, slots] or -1, in all places together."""
    rng = np.random.default_rng(seed)
    redundant = rng.multivariate_hypergeometric(
        [NUM_SLOTS - NUM_EXPERTS] * NUM_LAYERS, NUM_PLACES - NUM_LAYERS * NUM_EXPERTS
    )
    table = np.full((NUM_LAYERS, NUM_SLOTS), -1)
    for row, number in zip(table, redundant.tolist(), strict=True):
        extra = rng.integers(0, NUM_EXPERTS, number)
        used = rng.permutation(NUM_SLOTS)[: NUM_EXPERTS + number]
        row[used] = rng.permutation([*range(NUM_EXPERTS), *extra])
    assert (table >= 0).sum() == NUM_PLACES
    return table


def sharing(make):
    first, *others = layers = [make() for _ in range(NUM_LAYERS)]
    first.own_places(NUM_SLOTS, num_places=NUM_PLACES, num_spare=3)
    for layer in others:
        layer.share_places(first)
    return layers


def plain_slots(num_slots=0):
    return ExpertSlots(
        CONFIG.hidden_size, CONFIG.moe_intermediate_size, num_slots=num_slots, row_block=16
    )


def fp8_slots(num_slots=0):
    return Fp8ExpertSlots(
        GROUP, GROUP, num_slots=num_slots, num_spare=0, scale_format=ScaleFormat.FP32
    )


def payloads_of(num_bytes):
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_LAYERS, NUM_EXPERTS, num_bytes)
    return torch.randint(0, 60, shape, generator=generator, dtype=torch.uint8)


def fill(layers, table, payloads):
    for layer, slot in np.argwhere(table >= 0).tolist():
        layers[layer].write(slot, payloads[layer, table[layer, slot]])


def change(layers, before, after, payloads):
    """Switch as a rank does."""
    moved = np.argwhere((before != after) & (after >= 0)).tolist()
    emptied = np.argwhere((before >= 0) & (after < 0)).tolist()
    needed = {(layer, slot): payloads[layer, after[layer, slot]] for layer, slot in moved}
    StagedExperts.prepare(needed, layers, emptied=emptied).apply()


def assert_holds(layers, table, payloads):
    for layer, slot in np.argwhere(table >= 0).tolist():
        assert torch.equal(layers[layer].read(slot), payloads[layer, table[layer, slot]])


@pytest.mark.parametrize("make", [plain_slots, fp8_slots])
def test_slots_hold_their_experts_through_many_switches_of_full_places(make):
    num_bytes = len(make(1).read(0))
    layers, payloads = sharing(make), payloads_of(num_bytes)
    before = pooled_layout(0)
    fill(layers, before, payloads)
    assert_holds(layers, before, payloads)
    for seed in range(1, 30):
        after = pooled_layout(seed)
        change(layers, before, after, payloads)
        assert_holds(layers, after, payloads)
        before = after


def test_outputs_are_bitwise_those_of_layers_with_a_slot_for_each_expert():
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_LAYERS, NUM_EXPERTS, CONFIG.expert_bytes // 2)
    values = torch.randn(shape, generator=generator) / 6
    payloads = values.to(torch.bfloat16).view(torch.uint8)
    alone = [plain_slots(NUM_EXPERTS) for _ in range(NUM_LAYERS)]
    fill(alone, np.tile(np.arange(NUM_EXPERTS), (NUM_LAYERS, 1)), payloads)
    x = torch.randn(40, CONFIG.hidden_size, generator=generator)
    scores = torch.rand(40, NUM_EXPERTS, generator=generator)
    ids = scores.topk(TOP_K).indices
    routing = Routing(expert_ids_TK=ids, weights_TK=scores.gather(1, ids), scores_TE=scores)

    def run(layers, placement):
        step = ExpertParallel.local(CONFIG, placement).begin_step(num_tokens=len(x))
        return torch.stack([finish(step.stages(x, routing, experts)) for experts in layers])

    wanted = run(alone, PlacementTables.identity(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS))
    layers, before = sharing(plain_slots), pooled_layout(0)
    fill(layers, before, payloads)
    for seed in range(5):
        after = pooled_layout(seed)
        change(layers, before, after, payloads)
        placement = PlacementTables.from_layout(after, num_experts=NUM_EXPERTS)
        assert torch.equal(run(layers, placement), wanted)
        before = after


def test_fp8_places_are_enough_when_more_is_staged_than_is_spare():
    layers, payloads = sharing(fp8_slots), payloads_of(len(fp8_slots(1).read(0)))
    before, after = pooled_layout(0), pooled_layout(1)
    fill(layers, before, payloads)
    moved = {
        (layer, slot): payloads[layer, after[layer, slot]]
        for layer, slot in np.argwhere((before != after) & (after >= 0)).tolist()
    }
    emptied = np.argwhere((before >= 0) & (after < 0)).tolist()
    kept = StagedExperts.prepare(moved, layers, emptied=emptied)
    kept.apply()  # What it took stays taken while it is referred to.
    assert_holds(layers, after, payloads)
    assert kept.settle

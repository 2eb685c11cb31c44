"""A layout's shares reach the counters that workers report, through the model's dispatch."""

import dataclasses

import numpy as np
import torch

from equipoise.planning.layout import Layout
from equipoise.planning.realised import realised_shares
from equipoise.planning.shares import WHOLE, even_shares
from equipoise.worker.placement import placement_of
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.overlap import finish
from equipoise_model.plain.experts import ExpertSlots
from equipoise_model.plain.router import Routing
from tests.support.small_models import MOE_LAYERS

CONFIG = dataclasses.replace(
    MOE_LAYERS,
    hidden_size=16,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
)


def layout_with(shares):
    table = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 6, 1, 5], [7, 6, 5, 4, 3, 2, 1, 0, 7, 3, 1, 2]])
    return Layout(
        generation=1,
        num_experts=8,
        num_ranks=1,
        expert_of_slot=table.astype(np.int32),
        share_of_slot=shares,
    )


def uneven_shares():
    """Shares by which the second of an expert's two slots serves three times as much."""
    table = layout_with(None).expert_of_slot
    shares = even_shares(table, num_experts=8)
    for row, experts in zip(shares, table, strict=True):
        for expert in range(8):
            slots = np.flatnonzero(experts == expert)
            parts = 3 ** np.arange(len(slots))
            row[slots] = parts * WHOLE // parts.sum()
            row[slots[-1]] += WHOLE - row[slots].sum()
    return shares


def served(layout, *, num_steps=60, num_rows=64):
    """Rows per slot for tokens that choose experts at random; [layers, slots]."""
    ep = ExpertParallel.local(CONFIG, placement_of(layout))
    layers = [
        ExpertSlots(CONFIG.hidden_size, CONFIG.moe_intermediate_size, num_slots=12, row_block=None)
        for _ in range(CONFIG.num_moe_layers)
    ]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(num_steps):
            scores = torch.rand(num_rows, 8, generator=generator)
            ids = scores.topk(2).indices
            routing = Routing(expert_ids_TK=ids, weights_TK=scores.gather(1, ids), scores_TE=scores)
            step = ep.begin_step(num_tokens=num_rows)
            for experts in layers:
                finish(step.stages(torch.zeros(num_rows, CONFIG.hidden_size), routing, experts))
    return ep.loads()[0].slot_load_LS.astype(np.float64)


def test_slots_serve_the_shares_of_the_layout_within_chance():
    for shares, uneven_layers in ((None, 0), (uneven_shares(), 2)):
        layout = layout_with(shares)
        found = realised_shares(served(layout), layout)
        chance = np.sqrt(found.planned * (1 - found.planned) / found.assignments)
        assert abs(found.realised - found.planned) < 4 * chance
        assert found.misplaced < 0.03
        assert found.uneven_layers == uneven_layers


def test_a_worker_that_ignores_shares_is_detected():
    layout = layout_with(uneven_shares())
    found = realised_shares(served(layout_with(None)), layout)
    assert abs(found.realised - found.planned) > 0.2
    assert found.misplaced > 0.2

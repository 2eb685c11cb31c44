"""`balance_of_steps`: how even single steps are under a layout, by how replicas are chosen.

A layout balances the mean of the traffic; a step is a sample of it. Steps are drawn from the loads,
and their replicas chosen by the code that workers run.
"""

import numpy as np
import torch

from equipoise.cli.offline.steps_table import StepBalance
from equipoise.planning.arrays import Indices, Load, Weights
from equipoise.planning.balance import spread_layers
from equipoise.planning.layout import Layout
from equipoise_kernels.replica_balance import count_experts, replica_ends
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.placement import PlacementTables

MAX_LAYERS = 8
"""Layers that steps are drawn of, evenly spaced over the model."""

STEPS = 4
"""Steps of each layer."""

_SEED = 5
_DRAWN_TOGETHER = 64
"""Tokens whose experts are drawn in the same order of experts."""


def balance_of_steps(
    load: Load, layout: Layout, *, tokens_per_rank: int, experts_per_token: int
) -> StepBalance:
    """Draw a step of some layers and choose replicas both ways.

    Args:
        load: [layers, experts] in any unit.
        layout: the layout that serves the step.
        tokens_per_rank: tokens of each rank.
        experts_per_token: experts that a token uses.
    """
    rng, found = np.random.default_rng(_SEED), []
    tables = PlacementTables.from_layout(
        layout.expert_of_slot,
        num_experts=layout.num_experts,
        num_ranks=layout.num_ranks,
        generation=layout.generation,
        share_of_slot=layout.share_of_slot,
    )
    for layer in spread_layers(load, most=MAX_LAYERS).tolist():
        for _ in range(STEPS):
            drawn = _drawn(load[layer], tokens_per_rank * layout.num_ranks, experts_per_token, rng)
            both = _hashed(tables, layer, drawn), _balanced(tables, layer, drawn)
            found.append((drawn.size / layout.num_ranks, *(of_rank.max() for of_rank in both)))
    mean, hashed, balanced = np.array(found, dtype=np.float64).T
    return StepBalance(
        tokens_per_rank=tokens_per_rank,
        hashed=float((mean / hashed).mean()),
        balanced=float((mean / balanced).mean()),
        saved_assignments=float((hashed - balanced).mean()),
    )


def _drawn(load: Weights, num_tokens: int, top_k: int, rng: np.random.Generator) -> Indices:
    """Distinct experts of each token, [tokens, top_k], each as often as its load says.

    Systematic sampling (W. G. Madow, 1949).
    """
    ends = top_k * _in_a_token_at_most(load / load.sum(), top_k)
    parts = []
    for first in range(0, num_tokens, _DRAWN_TOGETHER):
        count = min(_DRAWN_TOGETHER, num_tokens - first)
        order = rng.permutation(len(load))
        points = rng.random((count, 1)) + np.arange(top_k)
        index = np.searchsorted(ends[order].cumsum(), points, side="right")
        parts.append(order[np.minimum(index, len(load) - 1)])
    return np.concatenate(parts)


def _in_a_token_at_most(part: Weights, top_k: int) -> Weights:
    """Bring down experts with more assignments than tokens have; the others get the rest."""
    while (part > (1.0 + 1e-9) / top_k).any():
        is_full = part >= 1.0 / top_k
        rest = 1.0 - is_full.sum() / top_k
        others = max(float(part[~is_full].sum()), 1e-300)
        part = np.where(is_full, 1.0 / top_k, part * rest / others)
    return part


def _hashed(tables: PlacementTables, layer: int, drawn: Indices) -> Indices:
    """Assignments of each rank, [ranks], by the layout's shares."""
    slots, count, ends = tables.of_layer(layer)
    ids = torch.from_numpy(drawn)
    replicas = choose_replicas(ids, torch.arange(len(ids)), count, layer=layer, share_ends_ER=ends)
    ranks = slots[ids, replicas].flatten() // tables.slots_per_rank
    return torch.bincount(ranks, minlength=tables.num_ranks).numpy()


def _balanced(tables: PlacementTables, layer: int, drawn: Indices) -> Indices:
    """Assignments of each rank, [ranks], as `balanced_replicas` divides them."""
    slots, count, ends = tables.of_layer(layer)
    load = count_experts(torch.from_numpy(drawn), num_experts=len(count))
    served = replica_ends(
        load,
        slots,
        count,
        num_ranks=tables.num_ranks,
        slots_per_rank=tables.slots_per_rank,
        share_ends_ER=ends,
    ).diff(dim=1, prepend=torch.zeros(len(count), 1, dtype=torch.int64))
    ranks = (slots // tables.slots_per_rank).clamp(0, tables.num_ranks - 1)
    of_rank = served.new_zeros(tables.num_ranks)
    return of_rank.scatter_add_(0, ranks.flatten(), served.flatten()).numpy()

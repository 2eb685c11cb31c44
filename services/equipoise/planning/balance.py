"""How evenly a placement spreads a load over ranks."""

from collections.abc import Sequence

import numpy as np

from equipoise.planning.layout import ExpertTable, Layout, count_replicas
from equipoise.planning.load import Load
from equipoise.planning.shares import WHOLE, ShareTable


def rank_loads(
    expert_of_slot: ExpertTable,
    *,
    load: Load,
    num_ranks: int,
    first_slot: Sequence[int] | None = None,
    share_of_slot: ShareTable | None = None,
) -> Load:
    """Load of each rank, [layers, ranks].

    `expert_of_slot` is int32 [layers, slots], `load` [layers, experts] in any unit. An expert's
    load splits over its replicas by their shares, `share_of_slot` [layers, slots], or evenly. Slots
    divide evenly over ranks unless `first_slot`, [ranks + 1], says which each rank owns.
    """
    if share_of_slot is None:
        replicas = count_replicas(expert_of_slot, num_experts=load.shape[1])
        load_of_slot = np.take_along_axis(load / np.maximum(replicas, 1), expert_of_slot, axis=1)
    else:
        of_expert = np.take_along_axis(load, expert_of_slot, axis=1)
        load_of_slot = of_expert * (share_of_slot / WHOLE)
    if first_slot is None:
        by_rank: Load = load_of_slot.reshape(len(load), num_ranks, -1).sum(axis=2)
        return by_rank
    assert len(first_slot) == num_ranks + 1, "a first slot for each rank, and the end"
    return np.add.reduceat(load_of_slot, first_slot[:-1], axis=1)


def layout_loads(layout: Layout, load: Load) -> Load:
    """Load of each rank under a layout and its shares, [layers, ranks]."""
    return rank_loads(
        layout.expert_of_slot,
        load=load,
        num_ranks=layout.num_ranks,
        first_slot=layout.first_slot,
        share_of_slot=layout.share_of_slot,
    )


def balancedness_per_layer(load_of_rank: Load) -> Load:
    """Mean / max rank load of each layer, [layers]; 1.0 for a layer without traffic."""
    busiest = load_of_rank.max(axis=1)
    idle = busiest <= 0
    per_layer: Load = np.where(idle, 1.0, load_of_rank.mean(axis=1) / np.where(idle, 1.0, busiest))
    return per_layer


def balancedness(load_of_rank: Load) -> float:
    """Mean / max rank load, mean over the layers with traffic; 1.0 is perfect, or no traffic.

    1 / balancedness is about how much longer a step takes than it would with even ranks.
    """
    busy = load_of_rank.max(axis=1) > 0
    return float(balancedness_per_layer(load_of_rank)[busy].mean()) if busy.any() else 1.0

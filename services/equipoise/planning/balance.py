"""How evenly a placement spreads a load over ranks."""

from collections.abc import Sequence

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Load, ShareTable
from equipoise.planning.layout import Layout
from equipoise.planning.shares import WHOLE


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
    cells = expert_of_slot + np.arange(len(load))[:, None] * load.shape[1]
    if share_of_slot is None:
        replicas = np.bincount(cells.ravel(), minlength=load.size)
        load_of_slot = np.take(load.ravel() / np.maximum(replicas, 1), cells)
    else:
        load_of_slot = np.take(load, cells) * (share_of_slot / WHOLE)
    if first_slot is None:
        by_rank: Load = load_of_slot.reshape(len(load), num_ranks, -1).sum(axis=2)
        return by_rank
    assert len(first_slot) == num_ranks + 1, "a first slot for each rank, and the end"
    return np.add.reduceat(load_of_slot, first_slot[:-1], axis=1)


def layout_loads(layout: Layout, load: Load) -> Load:
    """Load of each rank under a layout and its shares, as `rank_loads` has it."""
    return rank_loads(
        layout.expert_of_slot,
        load=load,
        num_ranks=layout.num_ranks,
        first_slot=layout.first_slot,
        share_of_slot=layout.share_of_slot,
    )


def balancedness_per_layer(rank_load: Load) -> Load:
    """Mean / max rank load of each layer, [..., layers]; 1.0 for a layer without traffic."""
    busiest = rank_load.max(axis=-1)
    idle = busiest <= 0
    per_layer: Load = np.where(idle, 1.0, rank_load.mean(axis=-1) / np.where(idle, 1.0, busiest))
    return per_layer


def balancedness(rank_load: Load) -> float:
    """Mean / max rank load, mean over the layers with traffic; 1.0 is perfect, or no traffic.

    1 / balancedness is about how much longer a step takes than it would with even ranks.
    """
    return mean_if_busy(balancedness_per_layer(rank_load), is_busy=rank_load.max(axis=1) > 0)


def mean_if_busy(per_layer: Load, *, is_busy: Bools) -> float:
    """The mean over the layers with traffic; 1.0 if there is none."""
    return float(per_layer[is_busy].mean()) if is_busy.any() else 1.0

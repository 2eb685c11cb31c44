"""Blanks: experts without load that stand for empty slots where an algorithm needs full ones.

Each is an expert of its own, numbered after those of the model, so that empty slots are not alike.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable, Indices
from equipoise.planning.topology import Topology


def with_blanks(table: ExpertTable, num_experts: int) -> ExpertTable:
    """Fill the empty slots with blanks, one for each slot of a layer; int32 [layers, slots]."""
    blanks = num_experts + np.arange(table.shape[1], dtype=np.int32)
    return np.where(table == EMPTY, blanks, table)


def without_blanks(table: ExpertTable, num_experts: int) -> ExpertTable:
    """Empty the slots that hold blanks; int32 [layers, slots]."""
    return np.where(table < num_experts, table, np.int32(EMPTY))


def widened(
    table: ExpertTable, topology: Topology, slots_of_rank: tuple[int, ...], *, fill: int
) -> ExpertTable:
    """Spread a table over all slots of a topology; ranks fill the first `slots_of_rank` of them."""
    wide = np.full((len(table), topology.num_slots), fill, dtype=np.int32)
    wide[:, columns_of(topology, slots_of_rank)] = table
    return wide


def narrowed(table: ExpertTable, topology: Topology, slots_of_rank: tuple[int, ...]) -> ExpertTable:
    """Keep the first `slots_of_rank` experts of each rank; int32 [layers, slots] or EMPTY."""
    parts = []
    for rank, size in enumerate(slots_of_rank):
        own = table[:, topology.first_slot[rank] : topology.first_slot[rank + 1]]
        order = np.argsort(own == EMPTY, axis=1, kind="stable")[:, :size]
        parts.append(np.take_along_axis(own, order, axis=1))
    return np.concatenate(parts, axis=1)


def columns_of(
    topology: Topology, slots_of_rank: Sequence[int], *, ranks: Iterable[int] | None = None
) -> Indices:
    """Number the first `slots_of_rank` slots of each rank, or of some `ranks`."""
    chosen = range(topology.num_ranks) if ranks is None else ranks
    first = topology.first_slot
    return np.concatenate([first[rank] + np.arange(slots_of_rank[rank]) for rank in chosen])

"""Blanks: experts without load that stand for empty slots where an algorithm needs full ones.

Each is an expert of its own, numbered after those of the model, so that empty slots are not alike.
"""

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


def narrowed(
    table: ExpertTable, topology: Topology, slots_of_rank: tuple[int, ...]
) -> ExpertTable:
    """Keep the first `slots_of_rank` experts of each rank; int32 [layers, slots].

    Where a rank holds fewer, its first expert is repeated: a needless twin, which no layout keeps.
    """
    parts = []
    for rank, size in enumerate(slots_of_rank):
        own = table[:, topology.first_slot[rank] : topology.first_slot[rank + 1]]
        order = np.argsort(own == EMPTY, axis=1, kind="stable")[:, :size]
        kept = np.take_along_axis(own, order, axis=1)
        parts.append(np.where(kept == EMPTY, np.maximum(kept[:, :1], 0), kept))
    return np.concatenate(parts, axis=1)


def columns_of(topology: Topology, slots_of_rank: tuple[int, ...]) -> Indices:
    """Number the first `slots_of_rank` slots of each rank."""
    pairs = zip(topology.first_slot, slots_of_rank, strict=False)
    return np.concatenate([np.arange(first, first + size) for first, size in pairs])

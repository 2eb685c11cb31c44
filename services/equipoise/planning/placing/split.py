"""`split`: the best shares for a load without moving experts.

Water filling: one expert at a time, its load is spread over the ranks that hold it so that they end
level, until nothing changes. Each step lowers the sum of squares of the rank loads and
never raises the highest one. The end state has the lowest possible maximum, because a sum of
squares over flows is convex.
"""

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part

MAX_SWEEPS = 64
"""Rounds over all experts of a layer. Most layers are level after a dozen. In long chains of ranks
that share experts in pairs load spreads slowly, and little is left to gain."""

TOLERANCE = 1e-4
"""Fraction of the mean rank load below which another round is not worthwhile."""


def split(
    table: ExpertTable, *, load: Load, rank_of_slot: Indices, first: Weights | None = None
) -> Weights:
    """Compute the fraction of its expert's load that each slot should serve, [layers, slots].

    `table` is int32 [layers, slots], `load` [layers, experts] in any unit, `rank_of_slot` int64
    [slots], ascending. Starts from the fractions in `first`, [layers, slots], or from even ones,
    and the result is never less balanced. If a rank holds an expert twice, the second slot serves
    nothing.
    """
    parts = np.zeros(table.shape) if first is None else first.copy()
    _split_layers(table, load, rank_of_slot, first is None, parts)
    return parts


@compiled
def _split_layers(
    table: Slots, load: Weights, rank_of_slot: Indices, starts_even: bool, parts: Weights
) -> None:
    """Fill `parts`, or improve its values."""
    num_ranks = rank_of_slot[-1] + 1
    for layer in range(len(table)):
        slots, first = _slots_by_expert(table[layer], load.shape[1])
        if starts_even:
            for slot in range(table.shape[1]):
                expert = table[layer, slot]
                parts[layer, slot] = 1.0 / (first[expert + 1] - first[expert])
        carried = np.zeros(num_ranks)
        for slot in range(table.shape[1]):
            carried[rank_of_slot[slot]] += load[layer, table[layer, slot]] * parts[layer, slot]
        enough = TOLERANCE * carried.sum() / num_ranks
        for _ in range(MAX_SWEEPS):
            most_moved = 0.0
            for expert in range(load.shape[1]):
                own = slots[first[expert] : first[expert + 1]]
                if len(own) > 1 and load[layer, expert] > 0.0:
                    moved = _pour(load[layer, expert], own, rank_of_slot, carried, parts[layer])
                    most_moved = max(most_moved, moved)
            if most_moved <= enough:
                break


@part
def _slots_by_expert(row: Slots, num_experts: int) -> tuple[Indices, Indices]:
    """Sort slots by expert; those of expert e are at first[e] to first[e + 1]."""
    first = np.zeros(num_experts + 1, dtype=np.int64)
    for expert in row:
        first[expert + 1] += 1
    first = np.cumsum(first)
    filled = first[:-1].copy()
    slots = np.empty(len(row), dtype=np.int64)
    for slot in range(len(row)):
        slots[filled[row[slot]]] = slot
        filled[row[slot]] += 1
    return slots, first


@part
def _pour(
    load: float, own: Indices, rank_of_slot: Indices, carried: Weights, parts: Weights
) -> float:
    """Redistribute one expert's load over its slots; returns the largest change of a slot."""
    floor = np.empty(len(own))
    for place in range(len(own)):
        rank = rank_of_slot[own[place]]
        is_twin = place > 0 and rank_of_slot[own[place - 1]] == rank
        carried[rank] -= load * parts[own[place]]
        floor[place] = np.inf if is_twin else 0.0
    for place in range(len(own)):
        floor[place] += carried[rank_of_slot[own[place]]]
    lowest_first = np.argsort(floor)
    below, level = 0.0, 0.0
    for place in range(len(own)):
        below += floor[lowest_first[place]]
        level = (load + below) / (place + 1)
        if place + 1 == len(own) or level <= floor[lowest_first[place + 1]]:
            break
    most_moved = 0.0
    for place in range(len(own)):
        served = max(0.0, level - floor[place])
        most_moved = max(most_moved, abs(served - load * parts[own[place]]))
        parts[own[place]] = served / load
        carried[rank_of_slot[own[place]]] += served
    return most_moved

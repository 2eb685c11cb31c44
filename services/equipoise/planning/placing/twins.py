"""Repairs placements with an expert twice on one rank, where the copy carries no extra load."""

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part


def repair_twins(
    table: ExpertTable,
    *,
    load: Load,
    num_ranks: int,
    num_nodes: int = 1,
    slots_of_rank: Indices | None = None,
) -> ExpertTable:
    """Swap every needless twin away at the lowest cost; int32 [layers, slots].

    A twin changes places with the slot of another rank that leaves the busier of the two ranks
    least loaded. If every rank has the expert already, the twin's slot goes to the expert with the
    most load per replica. Each step removes a twin and creates none, so the repair ends.

    Args:
        table: int32 [layers, slots].
        load: [layers, experts].
        num_ranks: the number of ranks.
        num_nodes: if above 1, each expert must be on one node only, and stays there.
        slots_of_rank: int64 [ranks]; None divides the slots evenly.
    """
    repaired = np.array(table, dtype=np.int32, order="C")
    if slots_of_rank is None:
        slots_of_rank = np.full(num_ranks, table.shape[1] // num_ranks, dtype=np.int64)
    first_slot = np.concatenate([[0], np.cumsum(slots_of_rank)])
    allowed = -(-int(slots_of_rank.max()) * num_nodes // load.shape[1])
    weights = np.ascontiguousarray(load, dtype=np.float64)
    ranks_per_node = num_ranks // num_nodes
    for node in range(num_nodes):
        bounds = first_slot[node * ranks_per_node : (node + 1) * ranks_per_node + 1]
        _repair_layers(repaired, weights, bounds, allowed)
    return repaired


@compiled
def _repair_layers(table: Slots, load: Weights, first_slot: Indices, allowed: int) -> None:
    """Repair the ranks of one node, which own the slots first_slot[0] to first_slot[-1] - 1."""
    num_copies = np.zeros(load.shape[1], dtype=np.int64)
    for layer in range(len(table)):
        for rank in range(len(first_slot) - 1):
            while True:
                own = _find_twin(table[layer], first_slot, rank, allowed, num_copies)
                if own < 0:
                    break
                _remove_twin(table[layer], load[layer], first_slot, own, allowed)


@part
def _find_twin(
    slots: Slots, first_slot: Indices, rank: int, allowed: int, num_copies: Indices
) -> int:
    """Find the first slot of a rank whose expert has too many copies there, or -1.

    `num_copies`, [experts], is scratch space, zero before and after.
    """
    begin, end = first_slot[rank], first_slot[rank + 1]
    most, found = 0, -1
    for slot in range(begin, end):
        num_copies[slots[slot]] += 1
        most = max(most, num_copies[slots[slot]])
    if most > allowed:
        found = begin
        while num_copies[slots[found]] <= allowed:
            found += 1
    for slot in range(begin, end):
        num_copies[slots[slot]] = 0
    return found


@part
def _remove_twin(slots: Slots, load: Weights, first_slot: Indices, own: int, allowed: int) -> None:
    """Move the twin in slot `own` to another rank, or give its slot to another expert."""
    rank = int(np.searchsorted(first_slot, own, side="right")) - 1
    twin = slots[own]
    num_replicas = np.zeros(len(load), dtype=np.int64)
    for slot in range(first_slot[0], first_slot[-1]):
        num_replicas[slots[slot]] += 1
    share = load / np.maximum(num_replicas, 1)
    mine = _carried(slots, share, first_slot, rank)
    best, chosen = np.inf, -1
    for other in range(len(first_slot) - 1):
        if other == rank or _count(slots, first_slot, other, twin) >= allowed:
            continue
        theirs = _carried(slots, share, first_slot, other)
        for slot in range(first_slot[other], first_slot[other + 1]):
            expert = slots[slot]
            brings = share[expert] - share[twin]
            busier = max(mine + brings, theirs - brings)
            # The other expert must have room here, or be a twin itself where it is.
            if busier < best and (
                _count(slots, first_slot, rank, expert) < allowed
                or _count(slots, first_slot, other, expert) > allowed
            ):
                best, chosen = busier, slot
    if chosen >= 0:
        slots[own], slots[chosen] = slots[chosen], twin
        return
    heir = -1
    for expert in range(len(load)):
        if (
            num_replicas[expert] > 0
            and (heir < 0 or share[expert] > share[heir])
            and _count(slots, first_slot, rank, expert) < allowed
        ):
            heir = expert
    slots[own] = heir


@part
def _carried(slots: Slots, share: Weights, first_slot: Indices, rank: int) -> float:
    total = 0.0
    for slot in range(first_slot[rank], first_slot[rank + 1]):
        total += share[slots[slot]]
    return total


@part
def _count(slots: Slots, first_slot: Indices, rank: int, expert: int) -> int:
    count = 0
    for slot in range(first_slot[rank], first_slot[rank + 1]):
        if slots[slot] == expert:
            count += 1
    return count

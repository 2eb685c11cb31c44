"""Gives every expert a slot after ranks were lost, by overwriting spare replicas."""

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable, Load, Slots
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.topology import Topology


def cover(problem: Problem) -> ExpertTable:
    """Return the placement in use with every expert in it, int32 [layers, slots].

    Valid layers stay as they are. In others each missing expert, the heaviest first, overwrites the
    replica of another expert on the rank that ends up least loaded. There are at least as many
    slots as experts, so such a replica always exists. Then needless twins are swapped away.
    """
    table, rank_of_slot = problem.held.copy(), problem.rank_of_slot
    invalid = np.flatnonzero(~problem.is_valid)
    for layer in invalid.tolist():
        slots, load = table[layer], problem.load[layer]
        missing = np.flatnonzero(np.bincount(slots, minlength=len(load)) == 0)
        for expert in missing[np.argsort(-load[missing], kind="stable")].tolist():
            replicas = np.bincount(slots, minlength=len(load))
            share = (load / np.maximum(replicas, 1))[slots]
            carried = np.bincount(rank_of_slot, weights=share)
            ends_up = carried[rank_of_slot] - share + load[expert]
            slots[np.where(replicas[slots] > 1, ends_up, np.inf).argmin()] = expert
    table[invalid] = repair_twins(
        table[invalid],
        load=problem.load[invalid],
        num_ranks=problem.topology.num_ranks,
        slots_of_rank=np.diff(problem.first_slot),
    )
    return table


def fill(slots: Slots, load: Load, topology: Topology) -> None:
    """Put an expert into every empty slot of a layer, in place, starting with the emptiest rank."""
    num_experts, first_slot = len(load), topology.first_slot
    replicas = np.bincount(slots[slots != EMPTY], minlength=num_experts)
    while (slots == EMPTY).any():
        rank = max(
            range(topology.num_ranks),
            key=lambda rank: np.count_nonzero(
                slots[first_slot[rank] : first_slot[rank + 1]] == EMPTY
            ),
        )
        own = slots[first_slot[rank] : first_slot[rank + 1]]
        here = np.bincount(own[own != EMPTY], minlength=num_experts)
        per_replica = np.where(replicas == 0, np.inf, load / np.maximum(replicas, 1))
        # Fewest copies on this rank first, then experts without a replica, then the heaviest.
        expert = int(np.lexsort((replicas, -load, -per_replica, here))[0])
        own[int(np.flatnonzero(own == EMPTY)[0])] = expert
        replicas[expert] += 1

"""Gives every expert a slot after ranks were lost, by overwriting spare replicas."""

import numpy as np

from equipoise.planning.arrays import ExpertTable
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.twins import repair_twins


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

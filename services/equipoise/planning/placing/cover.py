"""Gives every expert a slot after ranks were lost, by overwriting spare replicas."""

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Slots, Weights
from equipoise.planning.placing.problem import Problem


def cover(problem: Problem) -> ExpertTable:
    """Return the placement in use with every expert in it, int32 [layers, slots].

    Layers that hold all experts stay as they are. In others each missing expert, the heaviest
    first, overwrites the replica of another expert on the rank that ends up least loaded. There
    are at least as many slots as experts, so such a replica always exists.
    """
    table = problem.held.copy()
    for layer in np.flatnonzero(~problem.is_covered).tolist():
        replicas = np.bincount(table[layer], minlength=problem.model.num_experts)
        missing = np.flatnonzero(replicas == 0)
        heaviest_first = missing[np.argsort(-problem.load[layer, missing], kind="stable")]
        for expert in heaviest_first.tolist():
            slot = _slot_to_overwrite(
                table[layer], problem.load[layer], expert, problem.rank_of_slot
            )
            table[layer, slot] = expert
    return table


def _slot_to_overwrite(
    slots: Slots,
    load: Weights,
    expert: int,
    rank_of_slot: Indices,
) -> int:
    replicas = np.bincount(slots, minlength=len(load))
    share = (load / np.maximum(replicas, 1))[slots]
    carried = np.bincount(rank_of_slot, weights=share)
    ends_up = carried[rank_of_slot] - share + load[expert]
    return int(np.where(replicas[slots] > 1, ends_up, np.inf).argmin())

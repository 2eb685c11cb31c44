"""Gives every expert a slot after ranks were lost, by overwriting spare replicas."""

import math
from collections import Counter
from heapq import heapify, heappop, heappush, heapreplace

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
    """Put an expert into every empty slot of a layer, in place, starting with the emptiest rank.

    It is the one with the fewest copies on that rank, which is none as long as there are enough
    experts; of several, one without a replica, else that with the most load per replica.
    """
    is_empty, first_slot, loads = slots == EMPTY, topology.first_slot, load.tolist()
    num_empty = np.add.reduceat(is_empty, first_slot[:-1], dtype=np.int64)
    # The emptiest rank first. The number in front of a rank is the negative of its empty slots.
    ranks = [(-num, rank) for rank, num in enumerate(num_empty.tolist()) if num]
    heapify(ranks)
    replicas = np.bincount(slots[~is_empty], minlength=len(loads)).tolist()
    here = {
        rank: Counter(slots[first_slot[rank] : first_slot[rank + 1]].tolist()) for _, rank in ranks
    }

    def urgency(expert: int) -> tuple[float, float, int, int]:
        of_one = loads[expert] / replicas[expert] if replicas[expert] else math.inf
        return -of_one, -loads[expert], replicas[expert], expert

    queue = [urgency(expert) for expert in range(len(loads))] if ranks else []
    heapify(queue)
    while ranks:
        num, rank = ranks[0]
        passed = [heappop(queue)]
        while here[rank][passed[-1][-1]] and queue:
            passed.append(heappop(queue))
        expert = min(passed, key=lambda one: (here[rank][one[-1]], one))[-1]
        own = slots[first_slot[rank] : first_slot[rank + 1]]
        own[int((own == EMPTY).argmax())] = expert
        replicas[expert] += 1
        here[rank][expert] += 1
        for one in passed:
            heappush(queue, one if one[-1] != expert else urgency(expert))
        if num < -1:
            heapreplace(ranks, (num + 1, rank))
        else:
            heappop(ranks)

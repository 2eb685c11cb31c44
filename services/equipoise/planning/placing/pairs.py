"""`pair`: fill ranks of two slots, with numbers of replicas that make even pairs.

The best placement of given replicas on ranks of two slots is known: the heaviest with the lightest,
the second heaviest with the second lightest, and so on. So only the numbers of replicas are
searched. Those of the published greedy make the heaviest replica as light as possible, even where
nothing is light enough to be its partner.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part

TWO_SLOTS = 2

TOLERANCE = 5e-5
"""A rank within this fraction of the mean of its node counts as even."""

NUM_WORST = 3
"""Each step relieves one of this many pairs. With one, pools of 288 to 512 slots are 0.001 to 0.003
less balanced; with eight, the search takes two to three times as long for at most 0.002 more."""

MOST_WORK = 4_000_000
"""Bound on the compared pairs per layer, about 10 ms: what 512 slots need. With 2,048 slots it
allows no step."""


def pair(table: ExpertTable, *, load: Load, num_nodes: int) -> ExpertTable:
    """Place the experts of each node anew, two on each rank; int32 [layers, slots].

    The busiest rank of no node gets busier. A rank may get an expert twice.

    Args:
        table: int32 [layers, slots]; ranks have two slots, nodes equally many consecutive ranks.
        load: [layers, experts]; if there are several nodes, each expert is on one of them only.
        num_nodes: the number of nodes that experts do not leave.
    """
    paired = np.array(table, dtype=np.int32, order="C")
    _pair_layers(paired, np.ascontiguousarray(load, dtype=np.float64), num_nodes)
    return paired


class _Replicas(NamedTuple):
    """All replicas of one node's experts, lightest first; rank r has those at r and -1 - r."""

    load: Weights
    """Of each expert, [experts]."""
    num_replicas: Indices
    """Replicas of each expert, [experts]; 0 for those of other nodes."""
    expert_at: Indices
    """[slots]."""
    share_at: Weights
    """Load of each replica, [slots]."""
    mean: float
    """Mean load of a rank."""


@compiled
def _pair_layers(table: Slots, load: Weights, num_nodes: int) -> None:
    num_slots = table.shape[1] // num_nodes
    for layer in range(len(table)):
        for node in range(num_nodes):
            slots = table[layer, node * num_slots : (node + 1) * num_slots]
            count = np.bincount(slots, minlength=load.shape[1])
            expert_at = _search(load[layer], count, num_slots, MOST_WORK // num_nodes)
            for rank in range(num_slots // 2):
                slots[2 * rank] = expert_at[num_slots - 1 - rank]
                slots[2 * rank + 1] = expert_at[rank]


@part
def _search(load: Weights, count: Indices, num_slots: int, work: int) -> Indices:
    """Return the experts, lightest replica first, whose heaviest pair is lightest; [slots].

    Each step takes a replica from one expert and gives it to another, one of them in one of the
    heaviest pairs, so that the overload of all pairs falls most.
    """
    replicas = _lightest_first(load, count, num_slots)
    best, least, overload = replicas.expert_at, np.inf, np.inf
    while replicas.mean > 0:
        heaviest, worst = _worst(replicas)
        if heaviest < least:
            best, least = replicas.expert_at, heaviest
        num_changes = len(worst) * (np.sum(replicas.num_replicas > 1) + len(load))
        if heaviest <= replicas.mean * (1.0 + TOLERANCE) or num_changes * num_slots // 2 > work:
            break
        loses, gains, overload, spent = _best_change(replicas, worst, overload)
        if loses < 0:
            break
        work -= spent
        replicas.num_replicas[loses] -= 1
        replicas.num_replicas[gains] += 1
        replicas = _lightest_first(load, replicas.num_replicas, num_slots)
    return best


@part
def _lightest_first(load: Weights, count: Indices, num_slots: int) -> _Replicas:
    expert_of, share = np.empty(num_slots, dtype=np.int64), np.empty(num_slots)
    end = 0
    for expert in range(len(load)):
        for _ in range(count[expert]):
            expert_of[end] = expert
            share[end] = load[expert] / count[expert]
            end += 1
    order = np.argsort(share, kind="mergesort")
    return _Replicas(load, count, expert_of[order], share[order], share.sum() / (num_slots // 2))


@part
def _worst(replicas: _Replicas) -> tuple[float, Indices]:
    """Find the load of the heaviest pair, and the experts in the heaviest ones."""
    expert_at, share_at = replicas.expert_at, replicas.share_at
    num_ranks = len(share_at) // 2
    weight = share_at[:num_ranks] + share_at[::-1][:num_ranks]
    order = np.argsort(-weight, kind="mergesort")[:NUM_WORST]
    worst = np.unique(np.concatenate((expert_at[order], expert_at[len(expert_at) - 1 - order])))
    return weight[order[0]], worst


@part
def _best_change(
    replicas: _Replicas, worst: Indices, overload: float
) -> tuple[int, int, float, int]:
    """Find experts to take a replica from and to give it to, or -1; the overload; and the pairs.

    The overload of all pairs must fall below `overload`.
    """
    load, count, lightest = replicas.load, replicas.num_replicas, replicas.share_at[0]
    giver, taker, least, spent = -1, -1, overload, len(load)
    for loses in range(len(load)):
        # Where the lightest partner is too much for the grown replicas, nothing helps.
        if (
            count[loses] < 2
            or _excess(load[loses] / (count[loses] - 1) + lightest, replicas) >= least
        ):
            continue
        is_worst = (worst == loses).any()
        for index in range(len(load) if is_worst else len(worst)):
            gains = index if is_worst else int(worst[index])
            if gains != loses and count[gains] > 0:
                spent += len(replicas.share_at) // 2
                total = _overload_after(replicas, loses, gains, least)
                if total < least:
                    giver, taker, least = loses, gains, total
    return giver, taker, least, spent


@part
def _overload_after(replicas: _Replicas, loses: int, gains: int, enough: float) -> float:
    """Sum the excess of all pairs after a change of two counts; stops at `enough`.

    Walks the sorted replicas from both ends and merges the changed ones in.
    """
    load, count = replicas.load, replicas.num_replicas
    expert_at, share_at = replicas.expert_at, replicas.share_at
    grown, shrunk = load[loses] / (count[loses] - 1), load[gains] / (count[gains] + 1)
    low, low_grown, low_shrunk = 0, count[loses] - 1, count[gains] + 1
    high, high_grown, high_shrunk = len(share_at) - 1, low_grown, low_shrunk
    total = 0.0
    for _ in range(len(share_at) // 2):
        while low < len(share_at) and (expert_at[low] == loses or expert_at[low] == gains):
            low += 1
        light = share_at[low] if low < len(share_at) else np.inf
        if low_shrunk > 0 and shrunk < min(light, grown if low_grown > 0 else np.inf):
            light, low_shrunk = shrunk, low_shrunk - 1
        elif low_grown > 0 and grown <= light:
            light, low_grown = grown, low_grown - 1
        else:
            low += 1
        while high >= 0 and (expert_at[high] == loses or expert_at[high] == gains):
            high -= 1
        heavy = share_at[high] if high >= 0 else -np.inf
        if high_shrunk > 0 and shrunk > max(heavy, grown if high_grown > 0 else -np.inf):
            heavy, high_shrunk = shrunk, high_shrunk - 1
        elif high_grown > 0 and grown >= heavy:
            heavy, high_grown = grown, high_grown - 1
        else:
            high -= 1
        total += _excess(light + heavy, replicas)
        if total >= enough:
            break
    return total


@part
def _excess(weight: float, replicas: _Replicas) -> float:
    """By how much a pair exceeds the mean, to the eighth power: the heaviest matter most."""
    excess = max(weight / replicas.mean - 1.0, 0.0)
    excess *= excess
    excess *= excess
    return excess * excess

"""`pair`: fill ranks of two slots, with numbers of replicas that make even pairs.

The most even pairs of given replicas are known: the heaviest with the lightest, the second heaviest
with the second lightest, and so on. So only the numbers of replicas are searched. Those of the
published greedy make the heaviest replica as light as possible, even where nothing is light enough
to be its partner.

Only the pairs in the middle can have an expert twice. Such a pair is undone by a swap with another
one, and the search counts what that costs.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part

TWO_SLOTS = 2

TOLERANCE = 5e-5
"""A rank within this fraction of the mean of its node counts as even."""

NUM_WORST = 4
"""Each step relieves one of this many pairs. On recorded loads with 384 and 512 slots, eight take
nearly twice as long and are 0.001 better balanced."""

MOST_WORK = 16_000_000
"""Bound on the compared pairs per layer, about 60 ms; the step that exceeds it is the last. With
512 experts (lognormal loads, sigma 1) a complete search takes 18 million for 1,024 slots."""


def pair(table: ExpertTable, *, load: Load, num_nodes: int) -> ExpertTable:
    """Place the experts of each node anew, two on each rank; int32 [layers, slots].

    A rank may get an expert twice: see `repair_twins`.

    Args:
        table: int32 [layers, slots]; ranks have two slots, nodes equally many consecutive ranks.
        load: [layers, experts]; if there are several nodes, each expert is on one of them only.
        num_nodes: the number of nodes that experts do not leave.
    """
    paired = np.array(table, dtype=np.int32, order="C")
    _pair_layers(paired, np.array(load, dtype=np.float64, order="C"), num_nodes)
    return paired


class _Replicas(NamedTuple):
    """All replicas of one node, lightest first; rank r has those at r and -1 - r."""

    load: Weights
    """Of each expert, [experts], in mean rank loads."""
    num_replicas: Indices
    """Replicas of each expert, [experts]; at least 1."""
    expert_at: Indices
    """[slots]."""
    share_at: Weights
    """Load of each replica, [slots]."""


class _Change(NamedTuple):
    """How the sorted replicas move if an expert has another number of them."""

    expert: int
    old: int
    new: int
    share: float
    """Load of each of its replicas afterwards."""
    begin: int
    """Where its first replica is."""
    first: int
    """Where that will be."""


@compiled
def _pair_layers(table: Slots, load: Weights, num_nodes: int) -> None:
    num_slots = table.shape[1] // num_nodes
    num_ranks = num_slots // 2
    for layer in range(len(table)):
        for node in range(num_nodes):
            slots = table[layer, node * num_slots : (node + 1) * num_slots]
            count = np.bincount(slots, minlength=load.shape[1])
            experts = np.nonzero(count)[0]
            total = load[layer][experts].sum()
            if total <= 0:
                continue
            relative = load[layer][experts] * (num_ranks / total)
            found = experts[_search(relative, count[experts], MOST_WORK // num_nodes)]
            for rank in range(num_ranks):
                slots[2 * rank] = found[num_slots - 1 - rank]
                slots[2 * rank + 1] = found[rank]


@part
def _search(load: Weights, count: Indices, work: int) -> Indices:
    """Return the experts, lightest replica first, whose heaviest pair is lightest; [slots].

    Each step takes a replica from one expert and gives it to another, one of them in one of the
    heaviest pairs, so that the overload of all pairs is least. It falls with each step but the
    first, which may raise it to leave numbers that no single change improves. What undoing twins
    costs counts only after nothing else helps: good pairs are often reached by way of twins.
    """
    replicas = _lightest_first(load, count)
    best, least = replicas.expert_at, np.inf
    for undoes_twins in (False, True):
        overload = np.inf
        while True:
            heaviest = _weigh(replicas, True).max()
            if heaviest < least:
                best, least = replicas.expert_at, heaviest
            if least <= 1.0 + TOLERANCE or work <= 0:
                return best
            loses, gains, overload, spent = _best_step(replicas, overload, undoes_twins)
            if loses < 0:
                break
            work -= spent
            replicas = _changed(replicas, _change(replicas, loses, -1))
            replicas = _changed(replicas, _change(replicas, gains, 1))
        if not _is_twin(replicas, len(replicas.expert_at) // 2 - 1):
            break
    return best


@part
def _lightest_first(load: Weights, count: Indices) -> _Replicas:
    expert_of = np.repeat(np.arange(len(load)), count)
    share = (load / count)[expert_of]
    order = np.argsort(share, kind="mergesort")
    return _Replicas(load, count, expert_of[order], share[order])


@part
def _is_twin(replicas: _Replicas, rank: int) -> bool:
    return bool(replicas.expert_at[rank] == replicas.expert_at[-1 - rank])


@part
def _weigh(replicas: _Replicas, undoes_twins: bool) -> Weights:
    """Compute the load of each pair, [ranks].

    The innermost may have an expert twice. To undo that, each swaps with the nearest pair without
    that expert, and then counts as the heavier of both.
    """
    expert_at, share_at = replicas.expert_at, replicas.share_at
    num_ranks = len(share_at) // 2
    weight = share_at[:num_ranks] + share_at[::-1][:num_ranks]
    rank = other = num_ranks - 1
    while undoes_twins and rank >= 0 and _is_twin(replicas, rank):
        twin = expert_at[rank]
        while other >= 0 and (expert_at[other] == twin or expert_at[-1 - other] == twin):
            other -= 1
        weight[rank] = share_at[rank] + share_at[-1 - other] if other >= 0 else np.inf
        rank, other = rank - 1, other - 1
    return weight


@part
def _best_step(
    replicas: _Replicas, overload: float, undoes_twins: bool
) -> tuple[int, int, float, int]:
    """Find experts to take a replica from and to give it to, or -1; the overload; and the pairs.

    The overload of all pairs must fall below `overload`. Experts of the heaviest pairs gain a
    replica; only if that is no help, they lose one.
    """
    load, count, expert_at = replicas.load, replicas.num_replicas, replicas.expert_at
    heaviest = np.argsort(-_weigh(replicas, undoes_twins), kind="mergesort")[:NUM_WORST]
    worst = np.unique(np.concatenate((expert_at[heaviest], expert_at[-1 - heaviest])))
    # A replica that grows because its expert loses one has at least the lightest as its partner.
    lightest, grown = (load / (count + 1)).min(), np.full(len(load), np.inf)
    for expert in range(len(load)):
        if count[expert] > 1:
            grown[expert] = _excess(load[expert] / (count[expert] - 1) + lightest)
    giver, taker, least, spent = -1, -1, overload, 0
    for by in (1, -1):
        for expert in worst:
            if by < 0 and grown[expert] >= least:
                continue
            changed = _changed(replicas, _change(replicas, expert, by))
            for other in range(len(load)):
                if other == expert or (by > 0 and grown[other] >= least):
                    continue
                total, walked = _overload_after(
                    changed, _change(changed, other, -by), least, undoes_twins
                )
                spent += walked
                if total < least:
                    giver, taker, least = other, expert, total
        if giver >= 0:
            return (giver, taker, least, spent) if by > 0 else (taker, giver, least, spent)
    return -1, -1, least, spent


@part
def _change(replicas: _Replicas, expert: int, by: int) -> _Change:
    """Give an expert `by` more replicas."""
    load, old = replicas.load[expert], replicas.num_replicas[expert]
    begin = np.searchsorted(replicas.share_at, load / old)
    while replicas.expert_at[begin] != expert:
        begin += 1
    first = np.searchsorted(replicas.share_at, load / (old + by))
    if first > begin:
        first -= old
    return _Change(expert, old, old + by, load / (old + by), begin, first)


@part
def _before(change: _Change, index: int) -> int:
    """Where the replica at an index was before the change; -1 if the change made it."""
    if index >= change.first:
        if index < change.first + change.new:
            return -1
        index -= change.new
    return index if index < change.begin else index + change.old


@part
def _changed(replicas: _Replicas, change: _Change) -> _Replicas:
    count = replicas.num_replicas.copy()
    count[change.expert] = change.new
    num_slots = len(replicas.share_at) + change.new - change.old
    expert_at, share_at = np.empty(num_slots, dtype=np.int64), np.empty(num_slots)
    for index in range(num_slots):
        before = _before(change, index)
        expert_at[index] = change.expert if before < 0 else replicas.expert_at[before]
        share_at[index] = change.share if before < 0 else replicas.share_at[before]
    return _Replicas(replicas.load, count, expert_at, share_at)


@part
def _overload_after(
    replicas: _Replicas, change: _Change, enough: float, undoes_twins: bool
) -> tuple[float, int]:
    """Sum the excess of all pairs after a change; stops at `enough`; and count the pairs.

    A pair with an expert twice counts as after a swap with the nearest one before it.
    """
    expert_at, share_at = replicas.expert_at, replicas.share_at
    last = len(share_at) + change.new - change.old - 1
    total, above = 0.0, np.inf
    for rank in range((last + 1) // 2):
        low, high = _before(change, rank), _before(change, last - rank)
        light = change.share if low < 0 else share_at[low]
        heavy = change.share if high < 0 else share_at[high]
        if undoes_twins:
            is_twin = low == high if min(low, high) < 0 else expert_at[low] == expert_at[high]
            heavy = above = above if is_twin else heavy
        total += _excess(light + heavy)
        if total >= enough:
            return total, rank + 1
    return total, (last + 1) // 2


@part
def _excess(weight: float) -> float:
    """By how much a pair exceeds the mean, to the eighth power: the heaviest matter most."""
    excess = max(weight - 1.0, 0.0)
    excess *= excess
    excess *= excess
    return excess * excess

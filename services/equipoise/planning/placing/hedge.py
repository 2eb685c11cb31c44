"""`hedge`: the cheapest steps to a placement that serves several kinds of traffic at once.

Load of a rank above a threshold is excess, for each kind of traffic by itself, and counts by how
much of that kind is expected. The actions are those of `relieve`, which serves one load and is
many times faster: overwrite a spare replica, or swap two slots of different ranks. A step takes
load off the rank with the most excess that an action helps.

A rank's load under a mixture of kinds is at most the same mixture of its loads under each. So a
placement that serves some kinds well serves every mixture of them well.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.search_state import Counts, SearchSpace

MAX_STEPS_PER_SLOT = 2
"""Bound on the length of a path: two steps per slot. Real paths end long before."""

MOST_RANKS = 8
"""A step is sought for this many of the ranks with the most excess, until one has any."""

LEAST_EXCESS = 1e-9
"""Less excess is rounding."""


class HedgedPath(NamedTuple):
    """Steps from the start, with the state before and after each."""

    steps: Indices
    """[steps, 4]: a slot and its new expert, then another slot and its new expert, or -1 twice."""
    busiest: Load
    """[steps + 1, kinds]: load of the busiest rank under each kind."""
    moves: Indices
    """[steps + 1]: slots that differ from the start."""


class _Layer(NamedTuple):
    """One layer during the search; arrays, updated in place."""

    start: Slots
    slots: Slots
    first_slot: Indices
    rank_of_slot: Indices
    load: Load
    """[experts, kinds]; `share` is the load per replica."""
    share: Load
    num_replicas: Indices
    num_held: Counts
    """Replicas of each expert on each rank, [experts, ranks]."""
    carried: Load
    """[ranks, kinds]."""
    excess: Weights
    """By rank, over all kinds, [ranks]."""
    threshold: Weights
    """[kinds]."""
    weight: Weights
    """[kinds]."""
    step: Indices
    """[4]: the step found."""


@compiled
def hedge(
    start: Slots, load: Load, space: SearchSpace, threshold: Weights, weight: Weights
) -> HedgedPath:
    """Take load above the thresholds off the ranks of one layer until no step helps.

    `start` is int32 [slots] and holds every expert; `load` is [experts, kinds]; `threshold` and
    `weight`, how much of a kind is expected, are [kinds].
    """
    layer = _start(start, load, space, threshold, weight)
    max_steps = MAX_STEPS_PER_SLOT * len(start)
    steps = np.full((max_steps, 4), -1)
    busiest = np.zeros((max_steps + 1, len(weight)))
    moves = np.zeros(max_steps + 1, dtype=np.int64)
    _note_busiest(layer, busiest[0])
    count = 0
    while count < max_steps and _find_step(layer):
        _take(layer)
        steps[count] = layer.step
        count += 1
        for slot in range(len(start)):
            moves[count] += 1 if layer.slots[slot] != start[slot] else 0
        _note_busiest(layer, busiest[count])
    return HedgedPath(steps[:count], busiest[: count + 1], moves[: count + 1])


@part
def _start(
    start: Slots, load: Load, space: SearchSpace, threshold: Weights, weight: Weights
) -> _Layer:
    num_experts, num_kinds = load.shape
    num_ranks = len(space.first_slot) - 1
    layer = _Layer(
        start,
        start.copy(),
        space.first_slot,
        space.rank_of_slot,
        load,
        np.zeros((num_experts, num_kinds)),
        np.zeros(num_experts, dtype=np.int64),
        np.zeros((num_experts, num_ranks), dtype=np.int16),
        np.zeros((num_ranks, num_kinds)),
        np.zeros(num_ranks),
        threshold,
        weight,
        np.full(4, -1),
    )
    for slot in range(len(start)):
        layer.num_replicas[start[slot]] += 1
        layer.num_held[start[slot], layer.rank_of_slot[slot]] += 1
    for expert in range(num_experts):
        for kind in range(num_kinds):
            layer.share[expert, kind] = load[expert, kind] / max(layer.num_replicas[expert], 1)
    for rank in range(num_ranks):
        _weigh(layer, rank)
    return layer


@part
def _find_step(layer: _Layer) -> bool:
    """Find the step for the rank with the most excess that any step helps."""
    for busy in np.argsort(-layer.excess)[:MOST_RANKS]:
        if layer.excess[busy] <= LEAST_EXCESS:
            return False
        layer.step[:] = -1
        if _best_copy(layer, busy, _best_swap(layer, busy)) > LEAST_EXCESS:
            return True
    return False


@part
def _note_busiest(layer: _Layer, busiest: Weights) -> None:
    for kind in range(len(busiest)):
        busiest[kind] = layer.carried[:, kind].max()


@part
def _weigh(layer: _Layer, rank: int) -> None:
    """Recompute the load and the excess of a rank."""
    layer.carried[rank, :] = 0.0
    for slot in range(layer.first_slot[rank], layer.first_slot[rank + 1]):
        for kind in range(len(layer.weight)):
            layer.carried[rank, kind] += layer.share[layer.slots[slot], kind]
    over = np.maximum(layer.carried[rank] - layer.threshold, 0.0)
    layer.excess[rank] = (over * layer.weight).sum()


@part
def _take(layer: _Layer) -> None:
    """Apply the step found and update all totals."""
    step = layer.step
    is_concerned = np.zeros(len(layer.carried), dtype=np.bool_)
    concerned = np.array([layer.slots[step[0]], step[1]])
    for half in range(0, 4, 2):
        slot = step[half]
        if slot >= 0:
            before, rank = layer.slots[slot], layer.rank_of_slot[slot]
            layer.num_held[before, rank] -= 1
            layer.num_replicas[before] -= 1
            layer.slots[slot] = step[half + 1]
            layer.num_held[step[half + 1], rank] += 1
            layer.num_replicas[step[half + 1]] += 1
            is_concerned[rank] = True
    for expert in concerned:
        for kind in range(len(layer.weight)):
            layer.share[expert, kind] = layer.load[expert, kind] / layer.num_replicas[expert]
        for rank in range(len(is_concerned)):
            if layer.num_held[expert, rank] > 0:
                is_concerned[rank] = True
    for rank in range(len(is_concerned)):
        if is_concerned[rank]:
            _weigh(layer, rank)


@part
def _price(start: int, now: int, then: int) -> float:
    """Change in moves if a slot takes another expert."""
    return (0.0 if then == start else 1.0) - (0.0 if now == start else 1.0)


@part
def _best_swap(layer: _Layer, busy: int) -> float:
    """Find the best swap of a slot of the rank with a slot of another."""
    excess, step = layer.excess, layer.step
    slots, share, carried = layer.slots, layer.share, layer.carried
    start, threshold, weight = layer.start, layer.threshold, layer.weight
    best = LEAST_EXCESS
    for mine in range(layer.first_slot[busy], layer.first_slot[busy + 1]):
        one = slots[mine]
        most = 0.0  # Excess that goes with the expert.
        for kind in range(len(weight)):
            over = carried[busy, kind] - threshold[kind]
            most += weight[kind] * max(min(over, share[one, kind]), 0.0)
        for rank in range(len(carried)):
            if rank == busy or most + excess[rank] <= 0.5 * best or layer.num_held[one, rank]:
                continue
            both = excess[busy] + excess[rank]
            for theirs in range(layer.first_slot[rank], layer.first_slot[rank + 1]):
                two = slots[theirs]
                cost = _price(start[mine], one, two) + _price(start[theirs], two, one)
                cost = max(cost, 0.5)
                least = best * cost
                if most + excess[rank] <= least or layer.num_held[two, busy]:
                    continue
                removed = both
                for kind in range(len(weight)):
                    moved = share[one, kind] - share[two, kind]
                    here = carried[busy, kind] - moved - threshold[kind]
                    there = carried[rank, kind] + moved - threshold[kind]
                    removed -= weight[kind] * (max(here, 0.0) + max(there, 0.0))
                    if removed <= least:
                        break
                if removed > least:
                    best = removed / cost
                    step[0], step[1], step[2], step[3] = mine, two, theirs, one
    return best


@part
def _best_copy(layer: _Layer, busy: int, best: float) -> float:
    """Find a better copy: a replica of one of the rank's experts elsewhere, or another expert."""
    slots, num_replicas, num_held = layer.slots, layer.num_replicas, layer.num_held
    excess = layer.excess
    # The excess of the ranks that hold an expert is the most that another replica removes there.
    most = np.zeros(len(num_replicas))
    for slot in range(len(slots)):
        most[slots[slot]] += excess[layer.rank_of_slot[slot]]
    for slot in range(len(slots)):
        spared, rank = slots[slot], layer.rank_of_slot[slot]
        if num_replicas[spared] < 2:
            continue
        least = 0.5 * best - excess[rank]
        if rank == busy:
            for expert in range(len(num_replicas)):
                if most[expert] > least and expert != spared and num_held[expert, busy] == 0:
                    best = _weigh_copy(layer, slot, expert, best)
            continue
        for mine in range(layer.first_slot[busy], layer.first_slot[busy + 1]):
            expert = slots[mine]
            if most[expert] > least and expert != spared and num_held[expert, rank] == 0:
                best = _weigh_copy(layer, slot, expert, best)
    return best


@part
def _weigh_copy(layer: _Layer, slot: int, expert: int, best: float) -> float:
    """Write the copy of an expert into a slot if it removes more excess per move than the best."""
    spared, own = layer.slots[slot], layer.rank_of_slot[slot]
    cost = max(_price(layer.start[slot], spared, expert), 0.5)
    least = best * cost
    removed = _removed_on(layer, own, 1, spared, expert)
    # Ranks that hold the expert, which get relief; then those that hold the spared one.
    for rank in range(len(layer.carried)):
        if layer.num_held[expert, rank] and rank != own:
            removed += _removed_on(layer, rank, 0, spared, expert)
    if removed <= least:
        return best
    for rank in range(len(layer.carried)):
        if layer.num_held[spared, rank] and rank != own and not layer.num_held[expert, rank]:
            removed += _removed_on(layer, rank, 0, spared, expert)
    if removed <= least:
        return best
    layer.step[:] = -1
    layer.step[0], layer.step[1] = slot, expert
    return float(removed / cost)


@part
def _removed_on(layer: _Layer, rank: int, has_slot: int, spared: int, expert: int) -> float:
    """Compute the excess that a copy removes from one rank."""
    share, load, num_replicas = layer.share, layer.load, layer.num_replicas
    has_one, has_spared = layer.num_held[expert, rank], layer.num_held[spared, rank]
    then = 0.0
    for kind in range(len(layer.weight)):
        fewer = load[expert, kind] / (num_replicas[expert] + 1)
        carried = layer.carried[rank, kind] + has_one * (fewer - share[expert, kind])
        if has_spared:
            more = load[spared, kind] / (num_replicas[spared] - 1)
            carried += has_spared * (more - share[spared, kind]) - has_slot * more
        carried += has_slot * fewer
        if carried > layer.threshold[kind]:
            then += layer.weight[kind] * (carried - layer.threshold[kind])
    return float(layer.excess[rank] - then)

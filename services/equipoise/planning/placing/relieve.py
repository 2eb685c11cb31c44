"""`relieve`: from a placement in use, the cheapest steps that take load off overloaded ranks.

One layer at a time. Load above a threshold is excess; each step is the one action that removes most
excess per cost: overwrite a slot whose expert has another replica by one more replica of an expert
that needs it (one move), or swap two slots of different ranks (two moves). How low the threshold
should be depends on how far one wants to go, so callers try several and keep the best.

What moves cost is the caller's choice: copies, load that leaves its home node, or both.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.planning.placing.compiled import compiled, part

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]
Slots = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

MAX_STEPS_PER_SLOT = 2
"""A path visits a slot twice at most in the mean; real ones end long before."""


FROM_AFAR = 1.02
"""What a move costs, over one from a rank of the same node, if no rank there held the expert at the
start: little, so that near sources decide between moves that gain about alike (half of the moves
then have one on recorded loads, a quarter otherwise, and they are about as many)."""


class Ground(NamedTuple):
    """Where a layer's slots are, and what a step costs.

    `first_slot` is int64 [ranks + 1], `rank_of_slot` int64 [slots], `node_of_rank` int64 [ranks].
    `home_of_expert`, int64 [experts], is the node that should serve each expert. A step costs
    `cost_of_move` for each slot that differs from the start afterwards and did not before, a little
    more if its expert has to come from another node, and `cost_of_leaving` for each mean rank load
    that it takes off its home node.
    """

    first_slot: Indices
    rank_of_slot: Indices
    node_of_rank: Indices
    home_of_expert: Indices
    cost_of_move: float
    cost_of_leaving: float


class Path(NamedTuple):
    """Steps from the start on, and what has been reached and spent before and after each.

    `steps` is int64 [steps, 4]: a slot and its new expert, and another slot and its new expert, or
    -1 twice. `busiest` is the busiest rank's load, `moves` the number of slots that differ from
    the start, `off_home` the load served off its home node; each is [steps + 1].
    """

    steps: Indices
    busiest: Weights
    moves: Indices
    off_home: Weights


class _Layer(NamedTuple):
    """One layer on its way; arrays, changed in place."""

    start: Slots
    slots: Slots
    load: Weights
    num_replicas: Indices
    num_off_home: Indices
    share: Weights
    carried: Weights
    ground: Ground
    is_near: Bools
    """Whether a rank of each node held each expert at the start, [experts, nodes]."""


@compiled
def relieve(
    start: Slots, load: Weights, ground: Ground, threshold: float, max_off_home: float
) -> Path:
    """Take load above `threshold` off the ranks of one layer, as long as a step helps.

    `start` is int32 [slots] and covers every expert; `load` is [experts]. The path ends before a
    step after which more load than `max_off_home` would be served off its home node.
    """
    layer = _start(start, load, ground)
    max_steps = MAX_STEPS_PER_SLOT * len(start)
    steps = np.full((max_steps, 4), -1)
    busiest, off_home = np.zeros(max_steps + 1), np.zeros(max_steps + 1)
    moves = np.zeros(max_steps + 1, dtype=np.int64)
    busiest[0], off_home[0] = layer.carried.max(), _off_home(layer)
    count = 0
    while count < max_steps:
        copy_gain, copy_slot, expert = _best_copy(layer, threshold)
        swap_gain, own, other = _best_swap(layer, threshold, copy_gain)
        if swap_gain > copy_gain:
            steps[count, 0], steps[count, 1] = own, layer.slots[other]
            steps[count, 2], steps[count, 3] = other, layer.slots[own]
        elif copy_slot >= 0:
            steps[count, 0], steps[count, 1] = copy_slot, expert
        else:
            break
        for half in range(0, 4, 2):
            if steps[count, half] >= 0:
                layer.slots[steps[count, half]] = steps[count, half + 1]
        _weigh(layer)
        if _off_home(layer) > max_off_home:
            break
        count += 1
        moves[count] = (layer.slots != start).sum()
        busiest[count], off_home[count] = layer.carried.max(), _off_home(layer)
    return Path(steps[:count], busiest[: count + 1], moves[: count + 1], off_home[: count + 1])


@part
def _start(start: Slots, load: Weights, ground: Ground) -> _Layer:
    is_near = np.zeros((len(load), ground.node_of_rank.max() + 1), dtype=np.bool_)
    for slot in range(len(start)):
        is_near[start[slot], ground.node_of_rank[ground.rank_of_slot[slot]]] = True
    layer = _Layer(
        start,
        start.copy(),
        load,
        np.zeros(len(load), dtype=np.int64),
        np.zeros(len(load), dtype=np.int64),
        np.zeros(len(load)),
        np.zeros(len(ground.node_of_rank)),
        ground,
        is_near,
    )
    _weigh(layer)
    return layer


@part
def _weigh(layer: _Layer) -> None:
    """Count replicas and weigh ranks anew."""
    ground = layer.ground
    layer.num_replicas[:] = 0
    layer.num_off_home[:] = 0
    layer.carried[:] = 0.0
    for slot in range(len(layer.slots)):
        expert = layer.slots[slot]
        layer.num_replicas[expert] += 1
        layer.num_off_home[expert] += _is_off_home(ground, expert, ground.rank_of_slot[slot])
    layer.share[:] = layer.load / np.maximum(layer.num_replicas, 1)
    for slot in range(len(layer.slots)):
        layer.carried[ground.rank_of_slot[slot]] += layer.share[layer.slots[slot]]


@part
def _off_home(layer: _Layer) -> float:
    total: float = (layer.share * layer.num_off_home).sum()
    return total


@part
def _is_off_home(ground: Ground, expert: int, rank: int) -> int:
    return 1 if ground.node_of_rank[rank] != ground.home_of_expert[expert] else 0


@part
def _excess(load: float, threshold: float) -> float:
    return load - threshold if load > threshold else 0.0


@part
def _best_copy(layer: _Layer, threshold: float) -> tuple[float, int, int]:
    """The slot to overwrite and the expert to put there, and the excess removed per cost.

    Whether a rank that holds both experts gains or loses is counted as if they met on different
    ranks; excess is convex, so a step never removes less than that. Experts are tried in the
    order of the excess that a replica more of them removes elsewhere, until that is too little;
    among those that remove none, the lightest disturbs least.
    """
    falls, rises = _effects_of_one_replica(layer, threshold)
    lightest_first = np.argsort(layer.load / (layer.num_replicas + 1), kind="mergesort")
    neediest_first = lightest_first[np.argsort(-falls[lightest_first], kind="mergesort")]
    ground, carried = layer.ground, layer.carried
    least = 1e-9 * threshold
    best, chosen_slot, chosen = 0.0, -1, -1
    for slot in range(len(layer.slots)):
        spared, rank = layer.slots[slot], ground.rank_of_slot[slot]
        if layer.num_replicas[spared] < 2:
            continue
        here = _excess(carried[rank], threshold)
        more = layer.load[spared] / (layer.num_replicas[spared] - 1) - layer.share[spared]
        elsewhere = rises[spared] - (_excess(carried[rank] + more, threshold) - here)
        without = carried[rank] - layer.share[spared]
        needed = max(least, best * _least_cost(layer, slot))
        for expert in neediest_first:
            most = here - elsewhere + falls[expert]
            if most <= needed:
                break
            share = layer.load[expert] / (layer.num_replicas[expert] + 1)
            removed = most - _excess(without + share, threshold)
            if removed <= needed or _holds(layer, rank, expert):
                continue
            gain = removed / _cost_of_copy(layer, threshold, slot, expert)
            if gain > best:
                best, chosen_slot, chosen = gain, slot, expert
                needed = max(least, best * _least_cost(layer, slot))
    return best, chosen_slot, chosen


@part
def _least_cost(layer: _Layer, slot: int) -> float:
    """What changing a slot costs at least."""
    ground = layer.ground
    if ground.cost_of_leaving > 0.0 or layer.slots[slot] != layer.start[slot]:
        return ground.cost_of_move / 4
    return ground.cost_of_move


@part
def _effects_of_one_replica(layer: _Layer, threshold: float) -> tuple[Weights, Weights]:
    """Excess that one replica more of each expert removes, and one less adds; [experts]."""
    falls, rises = np.zeros(len(layer.load)), np.zeros(len(layer.load))
    for slot in range(len(layer.slots)):
        expert, load = layer.slots[slot], layer.carried[layer.ground.rank_of_slot[slot]]
        count = layer.num_replicas[expert]
        fall = layer.share[expert] - layer.load[expert] / (count + 1)
        falls[expert] += _excess(load, threshold) - _excess(load - fall, threshold)
        if count > 1:
            rise = layer.load[expert] / (count - 1) - layer.share[expert]
            rises[expert] += _excess(load + rise, threshold) - _excess(load, threshold)
    return falls, rises


@part
def _best_swap(layer: _Layer, threshold: float, best: float) -> tuple[float, int, int]:
    """Two slots whose swap removes more excess per cost than `best`, and how much; or -1."""
    ground, carried = layer.ground, layer.carried
    least = 1e-9 * threshold
    least_cost = _least_cost_of_ranks(layer)
    own, other = -1, -1
    for busy in range(len(carried)):
        excess = carried[busy] - threshold
        for rank in range(len(carried) if excess > 0.0 else 0):
            # What two ranks exchange cannot bring them below their mean.
            most = excess + _excess(carried[rank], threshold)
            most -= 2 * _excess((carried[busy] + carried[rank]) / 2, threshold)
            cost = least_cost[busy] + least_cost[rank]
            if carried[rank] >= carried[busy] or most <= max(least, best * cost):
                continue
            for mine in range(ground.first_slot[busy], ground.first_slot[busy + 1]):
                mine_share = layer.share[layer.slots[mine]]
                for theirs in range(ground.first_slot[rank], ground.first_slot[rank + 1]):
                    moved = mine_share - layer.share[layer.slots[theirs]]
                    if moved <= 0.0:
                        continue
                    removed = excess + _excess(carried[rank], threshold)
                    removed -= _excess(carried[busy] - moved, threshold)
                    removed -= _excess(carried[rank] + moved, threshold)
                    if removed <= max(least, best * cost):
                        continue
                    gain = removed / _cost_of_swap(layer, threshold, mine, theirs)
                    if (
                        gain > best
                        and not _holds(layer, rank, layer.slots[mine])
                        and not _holds(layer, busy, layer.slots[theirs])
                    ):
                        best, own, other = gain, mine, theirs
    return best, own, other


@part
def _least_cost_of_ranks(layer: _Layer) -> Weights:
    """What changing one slot of each rank costs at least, [ranks]; of a swap half the least."""
    least = np.full(len(layer.carried), np.inf)
    for slot in range(len(layer.slots)):
        rank = layer.ground.rank_of_slot[slot]
        least[rank] = min(least[rank], _least_cost(layer, slot))
    quarter = layer.ground.cost_of_move / 4
    return np.where(least > quarter, least, quarter / 2)


@part
def _cost_of_copy(layer: _Layer, threshold: float, slot: int, expert: int) -> float:
    ground, spared = layer.ground, layer.slots[slot]
    cost = ground.cost_of_move * _price(layer, slot, expert)
    if ground.cost_of_leaving > 0.0:
        rank = ground.rank_of_slot[slot]
        off_spared = layer.num_off_home[spared] - _is_off_home(ground, spared, rank)
        off_expert = layer.num_off_home[expert] + _is_off_home(ground, expert, rank)
        leaving = (
            layer.load[spared] * off_spared / (layer.num_replicas[spared] - 1)
            - layer.share[spared] * layer.num_off_home[spared]
            + layer.load[expert] * off_expert / (layer.num_replicas[expert] + 1)
            - layer.share[expert] * layer.num_off_home[expert]
        )
        cost += ground.cost_of_leaving * leaving / threshold
    return max(cost, ground.cost_of_move / 4)


@part
def _cost_of_swap(layer: _Layer, threshold: float, mine: int, theirs: int) -> float:
    ground = layer.ground
    one, two = layer.slots[mine], layer.slots[theirs]
    cost = ground.cost_of_move * (_price(layer, mine, two) + _price(layer, theirs, one))
    if ground.cost_of_leaving > 0.0:
        here, there = ground.rank_of_slot[mine], ground.rank_of_slot[theirs]
        leaving = layer.share[one] * (
            _is_off_home(ground, one, there) - _is_off_home(ground, one, here)
        ) + layer.share[two] * (_is_off_home(ground, two, here) - _is_off_home(ground, two, there))
        cost += ground.cost_of_leaving * leaving / threshold
    return max(cost, ground.cost_of_move / 4)


@part
def _price(layer: _Layer, slot: int, expert: int) -> float:
    """Moves more if `slot` takes `expert`: -1, 0, 1 or, from another node, a little more."""
    price = -1.0 if layer.slots[slot] != layer.start[slot] else 0.0
    if layer.start[slot] != expert:
        node = layer.ground.node_of_rank[layer.ground.rank_of_slot[slot]]
        price += 1.0 if layer.is_near[expert, node] else FROM_AFAR
    return price


@part
def _holds(layer: _Layer, rank: int, expert: int) -> bool:
    for slot in range(layer.ground.first_slot[rank], layer.ground.first_slot[rank + 1]):
        if layer.slots[slot] == expert:
            return True
    return False

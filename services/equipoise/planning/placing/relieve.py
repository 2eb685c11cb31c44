"""`relieve`: the cheapest steps that take load off overloaded ranks of a placement in use.

Traffic may be of several kinds, each with a load of its own: experts that are busy at different
times can share a rank. Load of a rank above a kind's threshold is excess and counts by how much of
that kind is expected. Each step is the action that removes the most excess per cost: overwrite a
spare replica with one more replica of an expert that needs it (one move), or swap two slots of
different ranks (two moves). The best threshold depends on the goal, so callers try several.
`refine` has the same actions but minimises the maximum at any number of moves; the loops share no
code, because the price decides here which candidates can be skipped.
"""

import numpy as np

from equipoise.planning.arrays import Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.search_state import Goal, SearchPath, SearchSpace, SearchState

MAX_STEPS_PER_SLOT = 2
"""Bound on the length of a path: two steps per slot. Real paths end long before."""

MOST_RANKS = 32
"""A step looks for a swap between this many of the busiest and of the least loaded ranks."""

LEAST_EXCESS = 1e-9
"""Less excess, in mean rank loads, is rounding."""

FROM_AFAR = 1.02
"""Cost of a move from another node, relative to one within the node. Slightly above 1, so that a
near source decides between moves of about equal gain: on recorded loads half of the moves then have
one, a quarter otherwise, and the number of moves stays about the same."""


@compiled
def relieve(start: Slots, load: Load, space: SearchSpace, goal: Goal) -> SearchPath:
    """Take load above the thresholds off the ranks of one layer until no step helps.

    `start` is int32 [slots] and holds every expert; `load` is [experts, kinds], where the mean load
    of a rank is 1. The path ends before a step that lets more load leave its home node than may.
    """
    layer = _start(start, load, space, goal)
    max_steps, num_kinds = MAX_STEPS_PER_SLOT * len(start), len(goal.weight)
    steps = np.full((max_steps, 4), -1)
    busiest, off_home = np.zeros((max_steps + 1, num_kinds)), np.zeros(max_steps + 1)
    moves = np.zeros(max_steps + 1, dtype=np.int64)
    count = -1
    while True:
        count += 1
        off_home[count] = (layer.mean_load * layer.num_off_home / layer.num_replicas).sum()
        if count > 0 and off_home[count] > goal.max_off_home:
            count -= 1
            break
        for kind in range(num_kinds):
            busiest[count, kind] = layer.carried[:, kind].max()
        if count == max_steps or _best_swap(layer, _best_copy(layer)) <= 0.0:
            break
        steps[count] = layer.step
        moves[count + 1] = moves[count] + _take(layer)
    return SearchPath(
        steps[:count], busiest[: count + 1], moves[: count + 1], off_home[: count + 1]
    )


@part
def _start(start: Slots, load: Load, space: SearchSpace, goal: Goal) -> SearchState:
    num_experts, num_kinds = load.shape
    num_ranks, num_nodes = len(space.node_of_rank), space.node_of_rank.max() + 1
    layer = SearchState(
        start,
        start.copy(),
        space,
        goal,
        load,
        np.zeros((num_experts, num_kinds)),
        np.zeros((num_experts, num_kinds)),
        np.zeros((num_experts, num_kinds)),
        (load * goal.weight).sum(axis=1),
        np.zeros(num_experts, dtype=np.int64),
        np.zeros(num_experts, dtype=np.int64),
        np.zeros((num_experts, num_ranks), dtype=np.int16),
        np.zeros((num_experts, num_nodes), dtype=np.int16),
        np.zeros((num_experts, num_nodes), dtype=np.bool_),
        np.zeros((num_ranks, num_kinds)),
        np.zeros(num_ranks),
        np.arange(num_experts),
        np.arange(num_ranks),
        np.full(4, -1),
    )
    for slot in range(len(start)):
        _count(layer, start[slot], space.rank_of_slot[slot], 1)
        layer.is_near[start[slot], space.node_of_rank[space.rank_of_slot[slot]]] = True
    for expert in range(num_experts):
        _split(layer, expert)
    for rank in range(num_ranks):
        _weigh(layer, rank)
    return layer


@part
def _count(layer: SearchState, expert: int, rank: int, change: int) -> None:
    """Count one replica more or less."""
    layer.num_replicas[expert] += change
    layer.num_held[expert, rank] += change
    layer.num_on_node[expert, layer.space.node_of_rank[rank]] += change
    if layer.space.home_of_expert[expert] != layer.space.node_of_rank[rank]:
        layer.num_off_home[expert] += change


@part
def _split(layer: SearchState, expert: int) -> None:
    """Recompute the shares of an expert."""
    count = layer.num_replicas[expert]
    for kind in range(len(layer.goal.weight)):
        load = layer.load[expert, kind]
        layer.share[expert, kind] = load / max(count, 1)
        layer.share_of_more[expert, kind] = load / (count + 1)
        layer.share_of_fewer[expert, kind] = load / (count - 1) if count > 1 else np.inf


@part
def _weigh(layer: SearchState, rank: int) -> None:
    """Recompute the load and the excess of a rank."""
    layer.excess[rank] = 0.0
    for kind in range(len(layer.goal.weight)):
        carried = 0.0
        for slot in range(layer.space.first_slot[rank], layer.space.first_slot[rank + 1]):
            carried += layer.share[layer.slots[slot], kind]
        layer.carried[rank, kind] = carried
        layer.excess[rank] += layer.goal.weight[kind] * max(
            carried - layer.goal.threshold[kind], 0.0
        )


@part
def _take(layer: SearchState) -> int:
    """Apply the step found, update all totals, and return the change in moves."""
    step, slots, moves = layer.step, layer.slots, 0
    one, two = slots[step[0]], step[1]
    for half in range(0, 4, 2):
        slot, expert = step[half], step[half + 1]
        if slot >= 0:
            rank = layer.space.rank_of_slot[slot]
            moves += int(expert != layer.start[slot]) - int(slots[slot] != layer.start[slot])
            _count(layer, slots[slot], rank, -1)
            _count(layer, expert, rank, 1)
            slots[slot] = expert
    _split(layer, one)
    _split(layer, two)
    for rank in range(len(layer.excess)):
        if layer.num_held[one, rank] or layer.num_held[two, rank]:
            _weigh(layer, rank)
    return moves


@part
def _best_copy(layer: SearchState) -> float:
    """Find the slot to overwrite and its new expert; returns the excess removed per cost.

    A rank that holds both experts is counted as if they were on different ranks; excess is convex,
    so a step never removes less than computed. Experts are tried in the order of the excess that
    one more replica removes elsewhere, until that is too little. Among those that remove none, the
    lightest adds least, and heavier ones do not remove more.
    """
    slots, num_held, share, excess = layer.slots, layer.num_held, layer.share, layer.excess
    threshold, weight, order = layer.goal.threshold, layer.goal.weight, layer.neediest_first
    move, share_of_more = layer.space.cost_of_move, layer.share_of_more
    falls, rises, rise_here = _effects_of_one_replica(layer)
    _sort(order, falls, layer.mean_load / (layer.num_replicas + 1))
    best, without = 0.0, np.zeros(len(weight))
    for slot in range(len(slots)):
        spared, rank = slots[slot], layer.space.rank_of_slot[slot]
        if layer.num_replicas[spared] < 2:
            continue
        can_return = layer.space.cost_of_leaving > 0.0 or spared != layer.start[slot]
        least_cost = move / 4 if can_return else move
        before = excess[rank] - rises[spared] + rise_here[slot]
        needed = max(LEAST_EXCESS, best * least_cost)
        most = before
        for kind in range(len(weight)):
            without[kind] = layer.carried[rank, kind] - share[spared, kind] - threshold[kind]
            most -= weight[kind] * max(without[kind], 0.0)
        for expert in order:
            if most + falls[expert] <= needed:
                break
            removed = before + falls[expert]
            for kind in range(len(weight)):
                removed -= weight[kind] * max(without[kind] + share_of_more[expert, kind], 0.0)
            if removed <= needed and falls[expert] <= 0.0:
                break
            if removed <= needed or num_held[expert, rank]:
                continue
            cost = _cost_of_copy(layer, slot, expert)
            if removed > best * cost:
                best = removed / cost
                needed = max(LEAST_EXCESS, best * least_cost)
                layer.step[0], layer.step[1], layer.step[2], layer.step[3] = slot, expert, -1, -1
    return best


@part
def _effects_of_one_replica(layer: SearchState) -> tuple[Weights, Weights, Weights]:
    """Compute the excess that one more replica of each expert removes, and one less adds.

    Returns both, [experts], and the latter by slot: the part of it that is on the slot's rank.
    """
    threshold, weight, carried, excess = (
        layer.goal.threshold,
        layer.goal.weight,
        layer.carried,
        layer.excess,
    )
    share, share_of_more, share_of_fewer = layer.share, layer.share_of_more, layer.share_of_fewer
    falls, rises = np.zeros(len(share)), np.zeros(len(share))
    rise_here = np.zeros(len(layer.slots))
    for slot in range(len(layer.slots)):
        expert, rank = layer.slots[slot], layer.space.rank_of_slot[slot]
        if excess[rank] > 0.0:
            for kind in range(len(weight)):
                fall = share[expert, kind] - share_of_more[expert, kind]
                over = max(carried[rank, kind] - threshold[kind], 0.0)
                falls[expert] += weight[kind] * min(fall, over)
        if layer.num_replicas[expert] > 1:
            rise_here[slot] = -excess[rank]
            for kind in range(len(weight)):
                rise = share_of_fewer[expert, kind] - share[expert, kind]
                over = carried[rank, kind] + rise - threshold[kind]
                rise_here[slot] += weight[kind] * max(over, 0.0)
            rises[expert] += rise_here[slot]
    return falls, rises, rise_here


@part
def _best_swap(layer: SearchState, best: float) -> float:
    """Find two slots whose swap removes more excess per cost than `best`; returns the best.

    A swap takes no more off a rank than its excess, or the load that goes with its expert. Only the
    most overloaded rank that any step helps is relieved.
    """
    excess, first_slot = layer.excess, layer.space.first_slot
    _sort(layer.lightest_first, -(layer.carried * layer.goal.weight).sum(axis=1), excess)
    for busy in np.argsort(-excess)[:MOST_RANKS]:
        if excess[busy] <= max(LEAST_EXCESS, best * layer.space.cost_of_move / 4):
            break
        for mine in range(first_slot[busy], first_slot[busy + 1]):
            best = _best_partner(layer, mine, best)
        if best > 0.0:
            break
    return best


@part
def _best_partner(layer: SearchState, mine: int, best: float) -> float:
    """Find a slot whose swap with slot `mine` removes more excess per cost than `best`.

    Slots that hold what they held at the start cost a move each, unless experts have homes.
    """
    slots, num_held, share, excess = layer.slots, layer.num_held, layer.share, layer.excess
    weight, first_slot = layer.goal.weight, layer.space.first_slot
    one, busy = slots[mine], layer.space.rank_of_slot[mine]
    over = layer.carried[busy] - layer.goal.threshold
    most = (weight * np.minimum(np.maximum(over, 0.0), share[one])).sum()
    without, move = over - share[one], layer.space.cost_of_move
    has_homes = layer.space.cost_of_leaving > 0.0
    can_return = has_homes or one != layer.start[mine]
    for rank in layer.lightest_first[:MOST_RANKS]:
        bound = most + excess[rank]
        if bound <= max(LEAST_EXCESS, best * move / 4) or num_held[one, rank]:
            continue
        for theirs in range(first_slot[rank], first_slot[rank + 1]):
            two = slots[theirs]
            least_cost = move / 4 if can_return or two != layer.start[theirs] else 2 * move
            needed = max(LEAST_EXCESS, best * least_cost)
            if bound <= needed:
                continue
            removed = excess[busy] + excess[rank]
            for kind in range(len(weight)):
                removed -= weight[kind] * max(without[kind] + share[two, kind], 0.0)
            if removed <= needed or num_held[two, busy]:
                continue
            removed -= _excess_if(layer, rank, two, one)
            cost = _cost_of_swap(layer, mine, theirs)
            if removed > max(needed, best * cost):
                best = removed / cost
                layer.step[0], layer.step[1], layer.step[2], layer.step[3] = mine, two, theirs, one
    return best


@part
def _excess_if(layer: SearchState, rank: int, gives: int, takes: int) -> float:
    """Excess of a rank if it gives away one of its experts for another."""
    excess = 0.0
    for kind in range(len(layer.goal.weight)):
        carried = layer.carried[rank, kind] - layer.share[gives, kind] + layer.share[takes, kind]
        excess += layer.goal.weight[kind] * max(carried - layer.goal.threshold[kind], 0.0)
    return excess


@part
def _cost_of_copy(layer: SearchState, slot: int, expert: int) -> float:
    space, spared = layer.space, layer.slots[slot]
    node = space.node_of_rank[space.rank_of_slot[slot]]
    cost = space.cost_of_move * _price(layer, slot, expert, node)
    if layer.num_on_node[expert, node] > 0:
        cost += space.cost_of_joining
    if space.cost_of_leaving > 0.0:
        cost += space.cost_of_leaving * _leaving_of_one(layer, expert, 1, node)
        cost += space.cost_of_leaving * _leaving_of_one(layer, spared, -1, node)
    return max(cost, space.cost_of_move / 4)


@part
def _leaving_of_one(layer: SearchState, expert: int, more: int, node: int) -> float:
    """Load that leaves its home node if an expert has one replica more or less on a node."""
    count, num_off_home = layer.num_replicas[expert], layer.num_off_home[expert]
    changed = num_off_home + more * int(layer.space.home_of_expert[expert] != node)
    part = changed / (count + more) - num_off_home / count
    return float(layer.mean_load[expert] * part)


@part
def _cost_of_swap(layer: SearchState, mine: int, theirs: int) -> float:
    space, one, two = layer.space, layer.slots[mine], layer.slots[theirs]
    here = space.node_of_rank[space.rank_of_slot[mine]]
    there = space.node_of_rank[space.rank_of_slot[theirs]]
    prices = _price(layer, mine, two, here) + _price(layer, theirs, one, there)
    cost = space.cost_of_move * prices
    if here != there:
        for expert, before, after in ((one, here, there), (two, there, here)):
            if layer.num_on_node[expert, after] > 0:
                cost += space.cost_of_joining
            home = space.home_of_expert[expert]
            left = int(after != home) - int(before != home)
            load = layer.mean_load[expert] / layer.num_replicas[expert]
            cost += space.cost_of_leaving * load * left
    return max(cost, space.cost_of_move / 4)


@part
def _price(layer: SearchState, slot: int, expert: int, node: int) -> float:
    """Change in moves if a slot takes an expert: -1, 0, 1, or slightly above from afar."""
    start = layer.start[slot]
    moves = (0.0 if expert == start else 1.0) - (0.0 if layer.slots[slot] == start else 1.0)
    is_near = layer.is_near[expert, node] or expert == start
    return moves if is_near else moves + (FROM_AFAR - 1.0)


@part
def _sort(order: Indices, most: Weights, least: Weights) -> None:
    """Sort by `most` descending, `least`, then index: an insertion sort of almost sorted input."""
    for end in range(1, len(order)):
        moved, place = order[end], end
        while place > 0:
            before = order[place - 1]
            if most[before] > most[moved]:
                break
            if most[before] == most[moved] and (
                least[before] < least[moved] or (least[before] == least[moved] and before < moved)
            ):
                break
            order[place] = before
            place -= 1
        order[place] = moved

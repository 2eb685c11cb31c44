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
from equipoise.planning.placing.search_state import (
    Goal,
    Partners,
    SearchPath,
    SearchSpace,
    SearchState,
    SpareSlots,
)

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
    _count(layer, start, np.arange(len(start)), 1)
    for slot in range(len(start)):
        layer.is_near[start[slot], space.node_of_rank[space.rank_of_slot[slot]]] = True
    _split(layer, np.arange(num_experts))
    _weigh(layer, np.arange(num_ranks))
    return layer


# Each access to a field of a tuple counts a reference, so loops take arrays from it beforehand.


@part
def _count(layer: SearchState, experts: Slots, slots: Indices, change: int) -> None:
    """Count one replica more or less of each of some experts, in some slots."""
    num_replicas, num_held, num_on_node = layer.num_replicas, layer.num_held, layer.num_on_node
    rank_of_slot, node_of_rank = layer.space.rank_of_slot, layer.space.node_of_rank
    num_off_home, home_of_expert = layer.num_off_home, layer.space.home_of_expert
    for expert, slot in zip(experts, slots):  # noqa: B905
        rank = rank_of_slot[slot]
        num_replicas[expert] += change
        num_held[expert, rank] += change
        num_on_node[expert, node_of_rank[rank]] += change
        if home_of_expert[expert] != node_of_rank[rank]:
            num_off_home[expert] += change


@part
def _split(layer: SearchState, experts: Indices) -> None:
    """Recompute the shares of some experts."""
    loads, num_replicas = layer.load, layer.num_replicas
    share, more, fewer = layer.share, layer.share_of_more, layer.share_of_fewer
    for expert in experts:
        count = num_replicas[expert]
        for kind in range(loads.shape[1]):
            load = loads[expert, kind]
            share[expert, kind] = load / max(count, 1)
            more[expert, kind] = load / (count + 1)
            fewer[expert, kind] = load / (count - 1) if count > 1 else np.inf


@part
def _weigh(layer: SearchState, ranks: Indices) -> None:
    """Recompute the load and the excess of some ranks."""
    first_slot, slots, share = layer.space.first_slot, layer.slots, layer.share
    weight, threshold, excess = layer.goal.weight, layer.goal.threshold, layer.excess
    carried_by = layer.carried
    for rank in ranks:
        excess[rank] = 0.0
        for kind in range(len(weight)):
            carried = 0.0
            for slot in range(first_slot[rank], first_slot[rank + 1]):
                carried += share[slots[slot], kind]
            carried_by[rank, kind] = carried
            excess[rank] += weight[kind] * max(carried - threshold[kind], 0.0)


@part
def _take(layer: SearchState) -> int:
    """Apply the step found, update all totals, and return the change in moves."""
    slots, start = layer.slots, layer.start
    taken = layer.step.reshape(2, 2)
    taken = taken[: 2 if taken[1, 0] >= 0 else 1]
    changed, experts = taken[:, 0], taken[:, 1]
    before = slots[changed]
    moves = (experts != start[changed]).sum() - (before != start[changed]).sum()
    _count(layer, before, changed, -1)
    _count(layer, experts.astype(np.int32), changed, 1)
    slots[changed] = experts
    both = np.array([before[0], experts[0]])
    _split(layer, both)
    num_held = layer.num_held
    _weigh(layer, np.flatnonzero((num_held[both[0]] > 0) | (num_held[both[1]] > 0)))
    return int(moves)


@part
def _best_copy(layer: SearchState) -> float:
    """Find the slot to overwrite and its new expert; returns the excess removed per cost.

    A rank that holds both experts is counted as if they were on different ranks; excess is convex,
    so a step never removes less than computed.
    """
    falls, rises, rise_here = _effects_of_one_replica(layer)
    _sort(layer.neediest_first, falls, layer.mean_load / (layer.num_replicas + 1))
    spare = _spare_slots(layer, rises, rise_here)
    most, least_cost, best = _most_by_copies(layer, spare, falls), spare.least_cost, 0.0
    if len(most) > 0:  # A guess, slightly lowered, rules out most slots but not itself.
        best = _best_copy_to(layer, spare, falls, int(most.argmax()), best) * (1.0 - 1e-12)
    for place in range(len(most)):
        if most[place] > max(LEAST_EXCESS, best * least_cost[place]):
            best = _best_copy_to(layer, spare, falls, place, best)
    return best


@part
def _spare_slots(layer: SearchState, rises: Weights, rise_here: Weights) -> SpareSlots:
    slots, start, rank_of_slot = layer.slots, layer.start, layer.space.rank_of_slot
    excess, carried, share = layer.excess, layer.carried, layer.share
    threshold, move = layer.goal.threshold, layer.space.cost_of_move
    has_homes = layer.space.cost_of_leaving > 0.0
    spare = np.flatnonzero(layer.num_replicas[slots] > 1)
    least_cost, before = np.empty(len(spare)), np.empty(len(spare))
    without = np.empty((len(threshold), len(spare)))
    for place in range(len(spare)):
        slot = spare[place]
        spared, rank = slots[slot], rank_of_slot[slot]
        least_cost[place] = move / 4 if has_homes or spared != start[slot] else move
        before[place] = excess[rank] - rises[spared] + rise_here[slot]
        for kind in range(len(threshold)):
            without[kind, place] = carried[rank, kind] - share[spared, kind] - threshold[kind]
    return SpareSlots(spare, least_cost, before, without)


@part
def _most_by_copies(layer: SearchState, spare: SpareSlots, falls: Weights) -> Weights:
    """Compute a bound on the excess that a copy to each spare slot removes, [spare slots].

    It ignores which experts the rank has. Only those count that add less than all before them,
    which remove more elsewhere; with several kinds, as little as any of them adds.
    """
    weight, added, before = layer.goal.weight, layer.share_of_more, spare.before
    num_spare, without = len(before), spare.without
    most, removed = np.full(num_spare, -np.inf), np.empty(num_spare)
    least = np.full(len(weight), np.inf)
    for expert in layer.neediest_first:
        adds_less = False
        for kind in range(len(weight)):
            if added[expert, kind] < least[kind]:
                least[kind], adds_less = added[expert, kind], True
        if not adds_less:
            continue
        fall, last = falls[expert], len(weight) - 1
        for place in range(num_spare):
            removed[place] = before[place] + fall
        for kind in range(last):
            left, more, part = without[kind], least[kind], weight[kind]
            for place in range(num_spare):
                removed[place] -= part * max(left[place] + more, 0.0)
        left, more, part = without[last], least[last], weight[last]
        for place in range(num_spare):
            here = removed[place] - part * max(left[place] + more, 0.0)
            most[place] = max(most[place], here)
    return most


@part
def _best_copy_to(
    layer: SearchState, spare: SpareSlots, falls: Weights, place: int, best: float
) -> float:
    """Find an expert for a spare slot that removes more excess per cost than `best`.

    Experts are tried in the order of the excess that one more replica removes elsewhere, until that
    is too little. Among those that remove none, the lightest adds least, and heavier ones do not
    remove more.
    """
    space, weight, order, step = layer.space, layer.goal.weight, layer.neediest_first, layer.step
    slot, before, without = spare.slots[place], spare.before[place], spare.without[:, place]
    rank, spared, start = space.rank_of_slot[slot], layer.slots[slot], layer.start[slot]
    node, move, added = space.node_of_rank[rank], space.cost_of_move, layer.share_of_more
    is_held, is_on_node = layer.num_held[:, rank], layer.num_on_node[:, node]
    is_near, joining, leaving = layer.is_near[:, node], space.cost_of_joining, space.cost_of_leaving
    least_cost = spare.least_cost[place]
    needed, most = max(LEAST_EXCESS, best * least_cost), before
    for kind in range(len(weight)):
        most -= weight[kind] * max(without[kind], 0.0)
    for expert in order:
        if most + falls[expert] <= needed:
            break
        removed = before + falls[expert]
        for kind in range(len(weight)):
            removed -= weight[kind] * max(without[kind] + added[expert, kind], 0.0)
        if removed <= needed and falls[expert] <= 0.0:
            break
        if removed <= needed or is_held[expert]:
            continue
        cost = move * _price(start, spared, expert, is_near[expert])
        cost += joining if is_on_node[expert] else 0.0
        if leaving > 0.0:
            cost += leaving * _leaving_of_one(layer, expert, 1, node)
            cost += leaving * _leaving_of_one(layer, spared, -1, node)
        cost = max(cost, move / 4)
        if removed > best * cost:
            best = removed / cost
            needed = max(LEAST_EXCESS, best * least_cost)
            step[0], step[1], step[2], step[3] = slot, expert, -1, -1
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
    slots, rank_of_slot, num_replicas = layer.slots, layer.space.rank_of_slot, layer.num_replicas
    falls, rises = np.zeros(len(share)), np.zeros(len(share))
    rise_here = np.zeros(len(slots))
    for slot in range(len(slots)):
        expert, rank = slots[slot], rank_of_slot[slot]
        if excess[rank] > 0.0:
            for kind in range(len(weight)):
                fall = share[expert, kind] - share_of_more[expert, kind]
                over = max(carried[rank, kind] - threshold[kind], 0.0)
                falls[expert] += weight[kind] * min(fall, over)
        if num_replicas[expert] > 1:
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

    Only the most overloaded rank that any step helps is relieved.
    """
    _sort(layer.lightest_first, -(layer.carried * layer.goal.weight).sum(axis=1), layer.excess)
    excess, partners = layer.excess, _partners(layer)
    busiest = np.array([excess.argmax()])
    if (excess == excess[busiest[0]]).sum() == 1:  # It usually suffices, and no sort is needed.
        found = _best_swap_of(layer, partners, busiest, best)
        if found > 0.0:
            return found
    return _best_swap_of(layer, partners, np.argsort(-excess)[:MOST_RANKS], best)


@part
def _best_swap_of(layer: SearchState, partners: Partners, ranks: Indices, best: float) -> float:
    """Find the best swap of the first of some ranks that any step helps, the most overloaded first.

    Returns the excess that it removes per cost, or `best` if none removes more.
    """
    first_slot, excess, move = layer.space.first_slot, layer.excess, layer.space.cost_of_move
    for busy in ranks:
        if excess[busy] <= max(LEAST_EXCESS, best * move / 4):
            break
        for mine in range(first_slot[busy], first_slot[busy + 1]):
            best = _best_partner(layer, partners, mine, best)
        if best > 0.0:
            break
    return best


@part
def _partners(layer: SearchState) -> Partners:
    first_slot, ranks = layer.space.first_slot, layer.lightest_first[:MOST_RANKS]
    slots, start, share, carried = layer.slots, layer.start, layer.share, layer.carried
    excess, move, num_kinds = layer.excess, layer.space.cost_of_move, len(layer.goal.weight)
    count, place = (first_slot[ranks + 1] - first_slot[ranks]).sum(), 0
    theirs, excess_of, least_cost = np.empty(count, np.int64), np.empty(count), np.empty(count)
    share_of, without = np.empty((num_kinds, count)), np.empty((num_kinds, count))
    for rank in ranks:
        for slot in range(first_slot[rank], first_slot[rank + 1]):
            expert = slots[slot]
            theirs[place], excess_of[place] = slot, excess[rank]
            least_cost[place] = 2 * move if expert == start[slot] else move / 4
            for kind in range(num_kinds):
                share_of[kind, place] = share[expert, kind]
                without[kind, place] = carried[rank, kind] - share[expert, kind]
            place += 1
    return Partners(theirs, excess_of, share_of, without, least_cost, np.empty(count))


@part
def _best_partner(layer: SearchState, partners: Partners, mine: int, best: float) -> float:
    """Find a slot whose swap with slot `mine` removes more excess per cost than `best`.

    Slots that hold what they held at the start cost a move each, unless experts have homes.
    """
    space, slots, start, step = layer.space, layer.slots, layer.start, layer.step
    num_held, num_on_node, is_near = layer.num_held, layer.num_on_node, layer.is_near
    rank_of_slot, node_of_rank, move = space.rank_of_slot, space.node_of_rank, space.cost_of_move
    joining, leaving = space.cost_of_joining, space.cost_of_leaving
    removed, least_cost, slot_of = partners.removed, partners.least_cost, partners.slots
    one, busy = slots[mine], rank_of_slot[mine]
    here = node_of_rank[busy]
    most_cost = move / 4 if leaving > 0.0 or one != start[mine] else np.inf
    _weigh_swaps(layer, partners, one, busy)
    for place in range(len(removed)):
        needed = best * min(least_cost[place], most_cost)
        if removed[place] <= max(LEAST_EXCESS, needed):
            continue
        theirs = slot_of[place]
        two, rank = slots[theirs], rank_of_slot[theirs]
        if num_held[one, rank] or num_held[two, busy]:
            continue
        there = node_of_rank[rank]
        cost = _price(start[mine], one, two, is_near[two, here])
        cost = move * (cost + _price(start[theirs], two, one, is_near[one, there]))
        if here != there:
            cost += joining * (int(num_on_node[one, there] > 0) + int(num_on_node[two, here] > 0))
            cost += leaving * _leaving_by_swap(layer, one, two, here, there) if leaving else 0.0
        cost = max(cost, move / 4)
        if removed[place] > best * cost:
            best = removed[place] / cost
            step[0], step[1], step[2], step[3] = mine, two, theirs, one
    return best


@part
def _weigh_swaps(layer: SearchState, partners: Partners, one: int, busy: int) -> None:
    """Compute the excess that a swap of an expert of a rank with each partner removes."""
    removed, excess_of, excess = partners.removed, partners.excess, layer.excess[busy]
    added = np.zeros(len(removed))
    for place in range(len(removed)):
        removed[place] = excess + excess_of[place]
    for kind in range(len(layer.goal.weight)):
        weight, threshold = layer.goal.weight[kind], layer.goal.threshold[kind]
        gives, gets = layer.share[one, kind], partners.share[kind]
        left, without = layer.carried[busy, kind] - threshold - gives, partners.without[kind]
        for place in range(len(removed)):
            removed[place] -= weight * max(left + gets[place], 0.0)
            added[place] += weight * max(without[place] + gives - threshold, 0.0)
    for place in range(len(removed)):
        removed[place] -= added[place]


@part
def _leaving_of_one(layer: SearchState, expert: int, more: int, node: int) -> float:
    """Load that leaves its home node if an expert has one replica more or less on a node."""
    count, num_off_home = layer.num_replicas[expert], layer.num_off_home[expert]
    changed = num_off_home + more * int(layer.space.home_of_expert[expert] != node)
    part = changed / (count + more) - num_off_home / count
    return float(layer.mean_load[expert] * part)


@part
def _leaving_by_swap(layer: SearchState, one: int, two: int, here: int, there: int) -> float:
    """Load that leaves its home node if two experts change nodes."""
    left = 0.0
    for expert, before, after in ((one, here, there), (two, there, here)):
        home = layer.space.home_of_expert[expert]
        load = layer.mean_load[expert] / layer.num_replicas[expert]
        left += load * (int(after != home) - int(before != home))
    return left


@part
def _price(start: int, held: int, expert: int, is_near: bool) -> float:
    """Change in moves if a slot takes an expert: -1, 0, 1, or slightly above from afar."""
    moves = (0.0 if expert == start else 1.0) - (0.0 if held == start else 1.0)
    return moves if is_near or expert == start else moves + (FROM_AFAR - 1.0)


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

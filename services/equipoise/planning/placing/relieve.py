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

from equipoise.planning.arrays import Bools, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.search_state import (
    Goal,
    Partners,
    SearchPath,
    SearchSpace,
    SearchState,
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
    mean_load, num_off_home, num_replicas = layer.mean_load, layer.num_off_home, layer.num_replicas
    count = -1
    while True:
        count += 1
        for expert in range(len(load)):
            off_home[count] += mean_load[expert] * num_off_home[expert] / num_replicas[expert]
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
    (num_experts, num_kinds), num_slots = load.shape, len(start)
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
        np.zeros(num_ranks),
        np.full(num_experts, -1),
        np.full(num_slots, -1),
        np.zeros(num_experts),
        np.full(num_slots, -np.inf),
        np.full(num_slots, -np.inf),
        np.zeros((num_kinds, num_slots)),
        np.full(num_slots, space.cost_of_move / (4 if space.cost_of_leaving > 0.0 else 1)),
        np.zeros(num_slots),
        np.arange(num_experts),
        np.arange(num_ranks),
        np.full(4, -1),
    )
    for slot in range(num_slots - 1, -1, -1):  # Each is put first in its list.
        _count(layer, start[slot], slot, 1)
        layer.is_near[start[slot], space.node_of_rank[space.rank_of_slot[slot]]] = True
    for expert in range(num_experts):
        _split(layer, expert)
    _weigh(layer, np.arange(num_ranks))
    return layer


# Each access to a field of a tuple counts a reference, so loops take arrays from it beforehand.


@part
def _count(layer: SearchState, expert: int, slot: int, change: int) -> None:
    """Count one replica more or less of an expert, in a slot."""
    space, next_replica = layer.space, layer.next_replica
    rank = space.rank_of_slot[slot]
    node = space.node_of_rank[rank]
    layer.num_replicas[expert] += change
    layer.num_held[expert, rank] += change
    layer.num_on_node[expert, node] += change
    if space.home_of_expert[expert] != node:
        layer.num_off_home[expert] += change
    before, after = -1, layer.first_replica[expert]
    while after >= 0 and after < slot:
        before, after = after, next_replica[after]
    if change > 0:
        next_replica[slot] = after
        after = slot
    else:
        after = next_replica[slot]
    if before < 0:
        layer.first_replica[expert] = after
    else:
        next_replica[before] = after


@part
def _split(layer: SearchState, expert: int) -> None:
    """Recompute the shares of an expert."""
    count = layer.num_replicas[expert]
    for kind in range(layer.load.shape[1]):
        load = layer.load[expert, kind]
        layer.share[expert, kind] = load / max(count, 1)
        layer.share_of_more[expert, kind] = load / (count + 1)
        layer.share_of_fewer[expert, kind] = load / (count - 1) if count > 1 else np.inf


@part
def _weigh(layer: SearchState, ranks: Indices) -> None:
    """Recompute the load of some ranks, and what steps with their experts change."""
    first_slot, slots, share = layer.space.first_slot, layer.slots, layer.share
    weight, threshold, excess = layer.goal.weight, layer.goal.threshold, layer.excess
    carried_by, mean_carried = layer.carried, layer.mean_carried
    is_affected = np.zeros(len(share), dtype=np.bool_)
    for rank in ranks:
        excess[rank] = mean_carried[rank] = 0.0
        for kind in range(len(weight)):
            carried = 0.0
            for slot in range(first_slot[rank], first_slot[rank + 1]):
                carried += share[slots[slot], kind]
                is_affected[slots[slot]] = True
            carried_by[rank, kind] = carried
            mean_carried[rank] += weight[kind] * carried
            excess[rank] += weight[kind] * max(carried - threshold[kind], 0.0)
    is_weighed = np.zeros(len(excess), dtype=np.bool_)
    is_weighed[ranks] = True
    _reorder(layer.lightest_first, is_weighed, -mean_carried, excess)
    _expect(layer, is_affected)


@part
def _expect(layer: SearchState, is_affected: Bools) -> None:
    """Recompute what one replica more or less of some experts changes, and bound copies anew.

    Bounds of slots with other experts increase only where copies remove more than before.
    """
    weight, carried, threshold = layer.goal.weight, layer.carried, layer.goal.threshold
    excess, rank_of_slot, worth = layer.excess, layer.space.rank_of_slot, layer.worth
    first_replica, next_replica = layer.first_replica, layer.next_replica
    share, share_of_more, fewer = layer.share, layer.share_of_more, layer.share_of_fewer
    falls, before, most, without = layer.fall, layer.before, layer.most, layer.without
    was, spare, num_spare = falls.copy(), np.empty(len(worth), np.int64), 0
    for expert in np.flatnonzero(is_affected):
        fall, rise, slot = 0.0, 0.0, first_replica[expert]
        is_spare = next_replica[slot] >= 0
        while slot >= 0:
            rank, before[slot] = rank_of_slot[slot], 0.0
            for kind in range(len(weight)):
                over = carried[rank, kind] - threshold[kind]
                less = share[expert, kind] - share_of_more[expert, kind]
                fall += weight[kind] * min(less, max(over, 0.0))
                without[kind, slot] = over - share[expert, kind]
                before[slot] += weight[kind] * max(without[kind, slot] + fewer[expert, kind], 0.0)
            rise += before[slot] - excess[rank]
            slot = next_replica[slot]
        falls[expert], slot = fall, first_replica[expert]
        while slot >= 0:
            worth[slot] = 0.0
            before[slot] = before[slot] - rise if is_spare else -np.inf
            most[slot] = before[slot]
            for kind in range(len(weight)):
                most[slot] -= weight[kind] * max(without[kind, slot], 0.0)
            if is_spare:
                spare[num_spare] = slot
                num_spare += 1
            slot = next_replica[slot]
    means = layer.mean_load / (layer.num_replicas + 1)
    _reorder(layer.neediest_first, is_affected, falls, means)
    _bound(layer, np.arange(len(worth)), falls > was)
    _bound(layer, spare[:num_spare], np.ones(len(was), dtype=np.bool_))


@part
def _bound(layer: SearchState, slots: Indices, counts: Bools) -> None:
    """Raise the bounds of some slots to what a copy of an expert that counts is worth at most.

    That ignores which experts the rank has. Of those that count, an expert matters only if it adds
    less than all before it, which remove more elsewhere; with several kinds, as little as any adds.
    """
    weight, falls, added = layer.goal.weight, layer.fall, layer.share_of_more
    before, without, most = layer.before[slots], layer.without[:, slots], np.zeros(len(slots))
    least, removed = np.full(len(weight), np.inf), np.empty(len(slots))
    for expert in layer.neediest_first:
        adds_less = False
        for kind in range(len(weight)):
            if counts[expert] and added[expert, kind] < least[kind]:
                least[kind], adds_less = added[expert, kind], True
        if not adds_less:
            continue
        fall = falls[expert]
        for place in range(len(slots)):
            removed[place] = before[place] + fall
        for kind in range(len(weight)):
            left, more, part = without[kind], least[kind], weight[kind]
            for place in range(len(slots)):
                removed[place] -= part * max(left[place] + more, 0.0)
        for place in range(len(slots)):
            most[place] = max(most[place], removed[place])
    least_cost, worth = layer.least_cost, layer.worth
    for place in range(len(slots)):
        slot = slots[place]
        worth[slot] = max(worth[slot], most[place] / least_cost[slot])


@part
def _bound_anew(layer: SearchState, expert: int, fall: float, added: Weights) -> None:
    """Raise the bounds of slots to which a copy of an expert now removes more than it did.

    Before, one more replica of it removed `fall` elsewhere and added `added`, [kinds].
    """
    weight, worth, least_cost = layer.goal.weight, layer.worth, layer.least_cost
    more, without = layer.share_of_more[expert], layer.without
    removed, was = layer.before + layer.fall[expert], layer.before + fall
    for kind in range(len(weight)):
        left = without[kind]
        for slot in range(len(removed)):
            removed[slot] -= weight[kind] * max(left[slot] + more[kind], 0.0)
            was[slot] -= weight[kind] * max(left[slot] + added[kind], 0.0)
    for slot in range(len(removed)):
        if removed[slot] > was[slot]:
            worth[slot] = max(worth[slot], removed[slot] / least_cost[slot])


@part
def _take(layer: SearchState) -> int:
    """Apply the step found, update all totals, and return the change in moves."""
    slots, start, num_held, space = layer.slots, layer.start, layer.num_held, layer.space
    move, has_homes = space.cost_of_move, space.cost_of_leaving > 0.0
    first, one, second, two = layer.step
    moves, fall, added = 0, layer.fall[one], layer.share_of_more[one].copy()
    spared = slots[first]
    for slot, expert in ((first, one), (second, two)):
        if slot < 0:
            continue
        rank, left = space.rank_of_slot[slot], slots[slot]
        moves += int(expert != start[slot]) - int(left != start[slot])
        _count(layer, left, slot, -1)
        _count(layer, expert, slot, 1)
        slots[slot] = expert
        if not has_homes:
            layer.least_cost[slot] = move if expert == start[slot] else move / 4
        if has_homes or layer.num_on_node[left, space.node_of_rank[rank]] == 0:
            layer.fall[left] = -1.0  # Copies of it cost less here now: its bounds are raised.
    if second >= 0:
        _weigh(layer, space.rank_of_slot[np.array([first, second])])
    else:
        if has_homes:
            layer.fall[one] = -1.0
        _split(layer, spared)
        _split(layer, one)
        _weigh(layer, np.flatnonzero((num_held[spared] > 0) | (num_held[one] > 0)))
        _bound_anew(layer, one, fall, added)
    return moves


@part
def _best_copy(layer: SearchState) -> float:
    """Find the slot to overwrite and its new expert; returns the excess removed per cost.

    A rank that holds both experts is counted as if they were on different ranks; excess is convex,
    so a step never removes less than computed. Experts are tried in the order of the excess that
    one more replica removes elsewhere, until that is too little.
    """
    weight, order, step, worth = layer.goal.weight, layer.neediest_first, layer.step, layer.worth
    rank_of_slot, num_held, without = layer.space.rank_of_slot, layer.num_held, layer.without
    node_of_rank, num_on_node, is_near = layer.space.node_of_rank, layer.num_on_node, layer.is_near
    slots, start, before, most = layer.slots, layer.start, layer.before, layer.most
    falls, added, least_costs, best = layer.fall, layer.share_of_more, layer.least_cost, 0.0
    move, joining = layer.space.cost_of_move, layer.space.cost_of_joining
    leaving = layer.space.cost_of_leaving
    for slot in np.append(np.array([worth.argmax()]), np.arange(len(worth))):
        if worth[slot] <= best:
            continue
        rank, least_cost, seen = rank_of_slot[slot], least_costs[slot], 0.0
        base, node = before[slot], node_of_rank[rank]
        for expert in order:
            needed = max(LEAST_EXCESS, seen * least_cost)
            if most[slot] + falls[expert] <= needed:
                break
            if num_held[expert, rank]:
                continue
            removed = base + falls[expert]
            for kind in range(len(weight)):
                removed -= weight[kind] * max(without[kind, slot] + added[expert, kind], 0.0)
            if removed > needed:
                cost = move * _price(start[slot], slots[slot], expert, is_near[expert, node])
                cost += joining * (num_on_node[expert, node] > 0)
                if leaving > 0.0:
                    cost += leaving * _leaving_by_copy(layer, slots[slot], expert, node)
                seen = max(seen, removed / max(cost, move / 4))
                if seen > best:
                    best = seen
                    step[0], step[1], step[2], step[3] = slot, expert, -1, -1
        worth[slot] = seen
    return best


@part
def _best_swap(layer: SearchState, best: float) -> float:
    """Find two slots whose swap removes more excess per cost than `best`; returns the best.

    Only the most overloaded rank that any step helps is relieved.
    """
    excess, move, busy = layer.excess, layer.space.cost_of_move, -1
    for _ in range(min(MOST_RANKS, len(excess))):
        busy = _next_busiest(excess, busy)
        if excess[busy] <= max(LEAST_EXCESS, best * move / 4):
            break
        best = _best_swap_of(layer, busy, best)
        if best > 0.0:
            break
    return best


@part
def _next_busiest(excess: Weights, busy: int) -> int:
    """Find the rank with the most excess after a rank, or of all after -1; ties by number."""
    found, most = -1, -1.0
    for rank in range(len(excess)):
        if excess[rank] > most and (
            busy < 0
            or excess[rank] < excess[busy]
            or (excess[rank] == excess[busy] and rank > busy)
        ):
            found, most = rank, excess[rank]
    return found


@part
def _best_swap_of(layer: SearchState, busy: int, best: float) -> float:
    """Find the swap with a slot of a rank that removes more excess per cost than `best`."""
    space, slots, start, step = layer.space, layer.slots, layer.start, layer.step
    weight, threshold, carried = layer.goal.weight, layer.goal.threshold, layer.carried
    share, num_held, rank_of_slot = layer.share, layer.num_held, space.rank_of_slot
    least, has_homes = space.cost_of_move / 4, space.cost_of_leaving > 0.0
    partners = _partners(layer, busy, max(LEAST_EXCESS, best * least))
    slot_of, both, least_cost = partners.slots, partners.excess, partners.least_cost
    removed = np.empty(len(both))
    for mine in range(space.first_slot[busy], space.first_slot[busy + 1]):
        one = slots[mine]
        most_cost = least if has_homes or one != start[mine] else np.inf
        for place in range(len(removed)):
            removed[place] = both[place]
        for kind in range(len(weight)):
            part, given, without = weight[kind], share[one, kind], partners.without[kind]
            left, gets = carried[busy, kind] - threshold[kind] - given, partners.share[kind]
            for place in range(len(removed)):
                kept, got = left + gets[place], without[place] + given
                removed[place] -= part * (max(kept, 0.0) + max(got, 0.0))
        for place in range(len(removed)):
            needed = best * min(least_cost[place], most_cost)
            if removed[place] <= max(LEAST_EXCESS, needed):
                continue
            theirs = slot_of[place]
            if num_held[one, rank_of_slot[theirs]] or num_held[slots[theirs], busy]:
                continue
            worth = removed[place] / _cost_of_swap(layer, mine, theirs)
            if worth > best:
                best = worth
                step[0], step[1], step[2], step[3] = mine, slots[theirs], theirs, one
    return best


@part
def _cost_of_swap(layer: SearchState, mine: int, theirs: int) -> float:
    space, start, is_near = layer.space, layer.start, layer.is_near
    one, two = layer.slots[mine], layer.slots[theirs]
    here = space.node_of_rank[space.rank_of_slot[mine]]
    there = space.node_of_rank[space.rank_of_slot[theirs]]
    cost = _price(start[mine], one, two, is_near[two, here])
    cost = space.cost_of_move * (cost + _price(start[theirs], two, one, is_near[one, there]))
    if here != there:
        joins = int(layer.num_on_node[one, there] > 0) + int(layer.num_on_node[two, here] > 0)
        cost += space.cost_of_joining * joins
        if space.cost_of_leaving > 0.0:
            cost += space.cost_of_leaving * _leaving_by_swap(layer, one, two, here, there)
    return max(cost, space.cost_of_move / 4)


@part
def _partners(layer: SearchState, busy: int, least: float) -> Partners:
    """List the slots of light ranks with which a swap of a rank may remove more than `least`.

    A swap adds to one rank what it takes off the other, so it removes no more than the one has too
    much, or the other has room for.
    """
    weight, threshold, carried = layer.goal.weight, layer.goal.threshold, layer.carried
    first_slot, slots, start, share = layer.space.first_slot, layer.slots, layer.start, layer.share
    ranks, excess, move = layer.lightest_first[:MOST_RANKS], layer.excess, layer.space.cost_of_move
    size, count = (first_slot[ranks + 1] - first_slot[ranks]).sum(), 0
    theirs, both, least_cost = np.empty(size, np.int64), np.empty(size), np.empty(size)
    gets, without = np.empty((len(weight), size)), np.empty((len(weight), size))
    for rank in ranks:
        most = 0.0
        for kind in range(len(weight)):
            over = carried[busy, kind] - threshold[kind]
            room = threshold[kind] - carried[rank, kind]
            most += weight[kind] * max(min(over, room), min(-room, -over), 0.0)
        if most <= least:
            continue
        for slot in range(first_slot[rank], first_slot[rank + 1]):
            theirs[count], both[count] = slot, excess[busy] + excess[rank]
            least_cost[count] = 2 * move if slots[slot] == start[slot] else move / 4
            for kind in range(len(weight)):
                gets[kind, count] = share[slots[slot], kind]
                without[kind, count] = carried[rank, kind] - threshold[kind] - gets[kind, count]
            count += 1
    return Partners(theirs[:count], both[:count], gets, without, least_cost)


@part
def _leaving_of_one(layer: SearchState, expert: int, more: int, node: int) -> float:
    """Load that leaves its home node if an expert has one replica more or less on a node."""
    count, num_off_home = layer.num_replicas[expert], layer.num_off_home[expert]
    changed = num_off_home + more * int(layer.space.home_of_expert[expert] != node)
    part = changed / (count + more) - num_off_home / count
    return float(layer.mean_load[expert] * part)


@part
def _leaving_by_copy(layer: SearchState, spared: int, expert: int, node: int) -> float:
    """Load that leaves its home node if a node gets a copy of an expert for one of another."""
    return _leaving_of_one(layer, expert, 1, node) + _leaving_of_one(layer, spared, -1, node)


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
def _reorder(order: Indices, is_moved: Bools, most: Weights, least: Weights) -> None:
    """Sort by `most` descending, `least`, then index, where only some may be out of order.

    Those are sorted by insertion, then merged into the others.
    """
    moved, count, end = np.empty(len(order), np.int64), 0, 0
    for one in order:
        if not is_moved[one]:
            order[end] = one
            end += 1
            continue
        place = count
        while place > 0 and _goes_before(one, moved[place - 1], most, least):
            moved[place] = moved[place - 1]
            place -= 1
        moved[place] = one
        count += 1
    for place in range(len(order) - 1, -1, -1):
        if count == 0:
            break
        if end > 0 and _goes_before(moved[count - 1], order[end - 1], most, least):
            end -= 1
            order[place] = order[end]
        else:
            count -= 1
            order[place] = moved[count]


@part
def _goes_before(one: int, other: int, most: Weights, least: Weights) -> bool:
    if most[one] != most[other]:
        return bool(most[one] > most[other])
    return bool(least[one] < least[other] or (least[one] == least[other] and one < other))

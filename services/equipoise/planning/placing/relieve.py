"""`relieve`: the cheapest steps that take load off overloaded ranks of a placement in use.

Load of a rank above a threshold is excess. Each step is the action that removes the most excess per
cost: overwrite a spare replica with one more replica of an expert that needs it (one move), or swap
two slots of different ranks (two moves). The best threshold depends on the goal, so callers try
several. `refine` has the same actions but minimises the maximum at any number of moves; the loops
share no code, because the price decides here which candidates can be skipped.
"""

import numpy as np

from equipoise.planning.arrays import Indices, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.search_state import (
    ExpertTotals,
    RankTotals,
    SearchPath,
    SearchSpace,
    SearchState,
    Swaps,
)

MAX_STEPS_PER_SLOT = 2
"""Bound on the length of a path: two steps per slot. Real paths end long before."""

MOST_RANKS = 32
"""A step looks for a swap between this many of the busiest and of the least loaded ranks."""

MOST_PAIRS = 1 << 17
"""Pairs of ranks whose best swap is cached; enough for all pairs of 362 ranks."""

FROM_AFAR = 1.02
"""Cost of a move from another node, relative to one within the node. Slightly above 1, so that a
near source decides between moves of about equal gain: on recorded loads half of the moves then have
one, a quarter otherwise, and the number of moves stays about the same."""


@compiled
def relieve(
    start: Slots, load: Weights, space: SearchSpace, threshold: float, max_off_home: float
) -> SearchPath:
    """Take load above `threshold` off the ranks of one layer until no step helps.

    `start` is int32 [slots] and holds every expert; `load` is [experts]. The path ends before a
    step that would raise the load served off its home node above `max_off_home`.
    """
    layer = _start(start, load, space)
    slots, ranks = layer.slots, layer.ranks
    max_steps = MAX_STEPS_PER_SLOT * len(start)
    steps = np.full((max_steps, 4), -1)
    busiest, off_home = np.zeros(max_steps + 1), np.zeros(max_steps + 1)
    moves = np.zeros(max_steps + 1, dtype=np.int64)
    busiest[0], off_home[0] = ranks.carried.max(), _off_home(layer)
    count = 0
    while count < max_steps:
        copy_gain, copy_slot, expert = _best_copy(layer, threshold)
        swap_gain, own, other = _best_swap(layer, threshold, copy_gain, count)
        if swap_gain > copy_gain:
            steps[count, 0], steps[count, 1] = own, slots[other]
            steps[count, 2], steps[count, 3] = other, slots[own]
        elif copy_slot >= 0:
            steps[count, 0], steps[count, 1] = copy_slot, expert
        else:
            break
        count += 1
        _take(layer, steps[count - 1], count)
        moves[count] = ranks.num_changed.sum()
        busiest[count], off_home[count] = ranks.carried.max(), _off_home(layer)
        if off_home[count] > max_off_home:
            count -= 1
            break
    return SearchPath(
        steps[:count], busiest[: count + 1], moves[: count + 1], off_home[: count + 1]
    )


@part
def _start(start: Slots, load: Weights, space: SearchSpace) -> SearchState:
    num_experts, num_ranks = len(load), len(space.node_of_rank)
    num_pairs = min(num_ranks * num_ranks, MOST_PAIRS)
    layer = SearchState(
        start,
        start.copy(),
        np.zeros(len(start)),
        np.zeros((num_experts, num_ranks), dtype=np.int16),
        np.zeros((num_experts, space.node_of_rank.max() + 1), dtype=np.int16),
        np.zeros((num_experts, space.node_of_rank.max() + 1), dtype=np.bool_),
        space,
        ExpertTotals(
            load,
            np.zeros(num_experts, dtype=np.int64),
            np.zeros(num_experts, dtype=np.int64),
            np.zeros(num_experts),
            np.zeros(num_experts),
            np.zeros(num_experts),
            np.arange(num_experts),
        ),
        RankTotals(
            np.zeros(num_ranks),
            np.zeros(num_ranks),
            np.zeros(num_ranks),
            np.zeros(num_ranks, dtype=np.int64),
            np.zeros(num_ranks, dtype=np.int64),
            np.arange(num_ranks),
        ),
        Swaps(
            np.full(num_pairs, -1),
            np.zeros(num_pairs, dtype=np.int64),
            np.zeros(num_pairs),
            np.zeros(num_pairs, dtype=np.int64),
            np.zeros(num_pairs, dtype=np.int64),
        ),
    )
    for slot in range(len(start)):
        expert, rank = start[slot], space.rank_of_slot[slot]
        layer.is_near[expert, space.node_of_rank[rank]] = True
        layer.num_held[expert, rank] += 1
        layer.num_on_node[expert, space.node_of_rank[rank]] += 1
    _split(layer, np.arange(num_experts))
    _weigh(layer, np.arange(num_experts), 0)
    return layer


@part
def _take(layer: SearchState, step: Indices, now: int) -> None:
    """Apply one or two changes and update all totals."""
    slots, num_held, rank_of_slot = layer.slots, layer.num_held, layer.space.rank_of_slot
    num_on_node, node_of_rank = layer.num_on_node, layer.space.node_of_rank
    concerned = np.array([slots[step[0]], step[1]])
    for half in range(0, 4, 2):
        slot = step[half]
        if slot >= 0:
            rank = rank_of_slot[slot]
            num_held[slots[slot], rank] -= 1
            num_on_node[slots[slot], node_of_rank[rank]] -= 1
            slots[slot] = step[half + 1]
            num_held[slots[slot], rank] += 1
            num_on_node[slots[slot], node_of_rank[rank]] += 1
    _split(layer, concerned)
    _weigh(layer, concerned, now)


@part
def _split(layer: SearchState, concerned: Indices) -> None:
    """Recompute replicas and shares of some experts."""
    num_held, node_of_rank = layer.num_held, layer.space.node_of_rank
    load, home_of_expert = layer.experts.load, layer.space.home_of_expert
    experts = layer.experts
    for expert in concerned:
        count, off_home = 0, 0
        for rank in range(len(node_of_rank)):
            count += num_held[expert, rank]
            if node_of_rank[rank] != home_of_expert[expert]:
                off_home += num_held[expert, rank]
        experts.num_replicas[expert], experts.num_off_home[expert] = count, off_home
        experts.share[expert] = load[expert] / max(count, 1)
        experts.share_of_more[expert] = load[expert] / (count + 1)
        experts.share_of_fewer[expert] = load[expert] / (count - 1) if count > 1 else np.inf


@part
def _weigh(layer: SearchState, concerned: Indices, now: int) -> None:
    """Recompute the totals of the ranks that hold any of some experts."""
    slots, start, share_of_slot = layer.slots, layer.start, layer.share_of_slot
    share, ranks, first_slot = layer.experts.share, layer.ranks, layer.space.first_slot
    num_held = layer.num_held
    for rank in range(len(first_slot) - 1):
        is_concerned = False
        for expert in concerned:
            is_concerned = is_concerned or num_held[expert, rank] > 0
        if not is_concerned:
            continue
        carried, heaviest, lightest, changed = 0.0, 0.0, np.inf, 0
        for slot in range(first_slot[rank], first_slot[rank + 1]):
            here = share[slots[slot]]
            share_of_slot[slot] = here
            carried += here
            heaviest, lightest = max(heaviest, here), min(lightest, here)
            changed += 1 if slots[slot] != start[slot] else 0
        ranks.carried[rank], ranks.num_changed[rank] = carried, changed
        ranks.heaviest[rank], ranks.lightest[rank] = heaviest, lightest
        ranks.weighed_at[rank] = now


@part
def _off_home(layer: SearchState) -> float:
    return float((layer.experts.share * layer.experts.num_off_home).sum())


@part
def _excess(load: float, threshold: float) -> float:
    return max(load - threshold, 0.0)


@part
def _best_copy(layer: SearchState, threshold: float) -> tuple[float, int, int]:
    """Find the slot to overwrite and its new expert; returns the excess removed per cost first.

    A rank that holds both experts is counted as if they were on different ranks; excess is convex,
    so a step never removes less than computed. Experts are tried in the order of the excess that
    one more replica removes elsewhere, until that is too little. Among those that remove none, the
    lightest adds least, and heavier ones do not remove more.
    """
    slots, start, share_of_slot = layer.slots, layer.start, layer.share_of_slot
    num_held, is_near, carried = layer.num_held, layer.is_near, layer.ranks.carried
    rank_of_slot, node_of_rank = layer.space.rank_of_slot, layer.space.node_of_rank
    num_replicas, neediest_first = layer.experts.num_replicas, layer.experts.neediest_first
    share_of_more, share_of_fewer = layer.experts.share_of_more, layer.experts.share_of_fewer
    falls, rises = _effects_of_one_replica(layer, threshold)
    _sort(neediest_first, falls, share_of_more)
    least, move = 1e-9 * threshold, layer.space.cost_of_move
    per_leaving = layer.space.cost_of_leaving / threshold
    share, num_off_home = layer.experts.share, layer.experts.num_off_home
    home_of_expert, num_on_node = layer.space.home_of_expert, layer.num_on_node
    joining = layer.space.cost_of_joining
    best, chosen_slot, chosen = 0.0, -1, -1
    for slot in range(len(slots)):
        spared, rank = slots[slot], rank_of_slot[slot]
        if num_replicas[spared] < 2:
            continue
        here, node = _excess(carried[rank], threshold), node_of_rank[rank]
        more = share_of_fewer[spared] - share_of_slot[slot]
        elsewhere = rises[spared] - (_excess(carried[rank] + more, threshold) - here)
        least_cost = move / 4 if per_leaving > 0.0 or spared != start[slot] else move
        needed = max(least, best * least_cost)
        without = carried[rank] - share_of_slot[slot]
        most_here = min(here, share_of_slot[slot]) - elsewhere
        for expert in neediest_first:
            if most_here + falls[expert] <= needed:
                break
            left = _excess(without + share_of_more[expert], threshold)
            removed = here - elsewhere + falls[expert] - left
            if removed <= needed and falls[expert] <= 0.0:
                break
            if removed <= needed or num_held[expert, rank]:
                continue
            cost = move * _price(start[slot], spared, expert, is_near[expert, node])
            cost += joining if num_on_node[expert, node] > 0 else 0.0
            if per_leaving > 0.0:
                num_left = num_off_home[spared] - int(home_of_expert[spared] != node)
                num_then = num_off_home[expert] + int(home_of_expert[expert] != node)
                cost += per_leaving * (
                    share_of_fewer[spared] * num_left
                    - share[spared] * num_off_home[spared]
                    + share_of_more[expert] * num_then
                    - share[expert] * num_off_home[expert]
                )
            gain = removed / max(cost, move / 4)
            if gain > best:
                best, chosen_slot, chosen = gain, slot, expert
                needed = max(least, best * least_cost)
    return best, chosen_slot, chosen


@part
def _effects_of_one_replica(layer: SearchState, threshold: float) -> tuple[Weights, Weights]:
    """Compute the excess that one more replica of each expert removes, and one less adds."""
    slots, share_of_slot, first_slot = layer.slots, layer.share_of_slot, layer.space.first_slot
    carried, num_replicas = layer.ranks.carried, layer.experts.num_replicas
    share_of_more, share_of_fewer = layer.experts.share_of_more, layer.experts.share_of_fewer
    falls, rises = np.zeros(len(num_replicas)), np.zeros(len(num_replicas))
    for rank in range(len(carried)):
        load, here = carried[rank], _excess(carried[rank], threshold)
        for slot in range(first_slot[rank], first_slot[rank + 1]):
            expert, share = slots[slot], share_of_slot[slot]
            if here > 0.0:
                fall = share - share_of_more[expert]
                falls[expert] += here - _excess(load - fall, threshold)
            if num_replicas[expert] > 1:
                rise = share_of_fewer[expert] - share
                rises[expert] += _excess(load + rise, threshold) - here
    return falls, rises


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


@part
def _best_swap(
    layer: SearchState, threshold: float, best: float, now: int
) -> tuple[float, int, int]:
    """Find two slots whose swap removes more excess per cost than `best`, or -1.

    A swap takes no more off a rank than its excess, the room of the other, or the largest share of
    one minus the smallest of the other. Only if that could beat `best` are the slots compared,
    unless the cached result for the pair is still valid.
    """
    slots, start, share_of_slot = layer.slots, layer.start, layer.share_of_slot
    num_held, is_near, first_slot = layer.num_held, layer.is_near, layer.space.first_slot
    node_of_rank, home_of_expert = layer.space.node_of_rank, layer.space.home_of_expert
    carried, heaviest, lightest = layer.ranks.carried, layer.ranks.heaviest, layer.ranks.lightest
    num_changed, weighed_at = layer.ranks.num_changed, layer.ranks.weighed_at
    known, found_at, gains = layer.swaps.pair, layer.swaps.found_at, layer.swaps.gain
    owns, others, order = layer.swaps.own, layer.swaps.other, layer.ranks.busiest_first
    per_leaving, move = layer.space.cost_of_leaving / threshold, layer.space.cost_of_move
    least, own, other = 1e-9 * threshold, -1, -1
    _sort(order, carried, carried)
    for busy in order[:MOST_RANKS]:
        excess, here = carried[busy] - threshold, node_of_rank[busy]
        for rank in order[: -MOST_RANKS - 1 : -1]:
            room, needed = threshold - carried[rank], max(least, best * move / 4)
            has_changed = per_leaving > 0.0 or num_changed[busy] + num_changed[rank] > 0
            most = min(excess, room, heaviest[busy] - lightest[rank])
            if most <= (needed if has_changed else max(least, best * 2 * move)):
                continue
            pair, there = busy * len(carried) + rank, node_of_rank[rank]
            place = pair % len(known)
            is_known = known[place] == pair
            is_known &= found_at[place] >= max(weighed_at[busy], weighed_at[rank])
            if is_known and gains[place] <= best:
                continue
            is_found = is_known and owns[place] >= 0
            first = owns[place] if is_found else first_slot[busy]
            other_first = others[place] if is_found else first_slot[rank]
            end = first + 1 if is_found else first_slot[busy + 1]
            other_end = other_first + 1 if is_found else first_slot[rank + 1]
            owns[place] = -1
            for mine in range(first, end):
                one, share = slots[mine], share_of_slot[mine]
                if share - lightest[rank] <= needed or num_held[one, rank]:
                    continue
                for theirs in range(other_first, other_end):
                    moved = share - share_of_slot[theirs]
                    removed = min(moved, excess) - max(moved - room, 0.0)
                    if removed <= needed:
                        continue
                    two = slots[theirs]
                    leaving = share * _leaving(home_of_expert[one], here, there)
                    leaving += (share - moved) * _leaving(home_of_expert[two], there, here)
                    cost = _price(start[mine], one, two, is_near[two, here])
                    cost += _price(start[theirs], two, one, is_near[one, there])
                    cost = cost * move + leaving * per_leaving
                    cost += _joining(layer, one, here, there) + _joining(layer, two, there, here)
                    cost = max(cost, move / 4)
                    if removed > best * cost and not num_held[two, busy]:
                        best, own, other = removed / cost, mine, theirs
                        owns[place], others[place] = mine, theirs
                        needed = max(least, best * move / 4)
            known[place], found_at[place], gains[place] = pair, now, best
    return best, own, other


@part
def _price(start: int, now: int, then: int, is_near: bool) -> float:
    """Change in moves if a slot takes another expert: -1, 0, 1, or slightly above from afar."""
    moves = (0.0 if then == start else 1.0) - (0.0 if now == start else 1.0)
    return moves if is_near or then == start else moves + (FROM_AFAR - 1.0)


@part
def _joining(layer: SearchState, expert: int, here: int, there: int) -> float:
    """Cost of a replica that goes to another node, if that has one of its expert already."""
    joins = here != there and layer.num_on_node[expert, there] > 0
    return layer.space.cost_of_joining if joins else 0.0


@part
def _leaving(home: int, here: int, there: int) -> int:
    """Change in replicas off home if one goes from one node to another: -1, 0 or 1."""
    return int(there != home) - int(here != home)

"""`into_rooms`: assigns each layer's sets of experts to ranks so that all ranks have room for them.

Which rank holds which set does not change the balance of a layer, and sets have different sizes. So
the experts that a rank holds over all layers can be brought down to its places by exchanging sets.
"""

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, Slots, Weights
from equipoise.planning.placing.blanks import with_blanks, without_blanks
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.stay import align, relabel


def into_rooms(
    problem: Problem, table: ExpertTable, *, room: Indices, by_node: bool = False
) -> ExpertTable:
    """Exchange sets of experts until each rank has room for its own; int32 [layers, slots].

    Starts close to what ranks hold. Sets leave the others of their node only where that is
    necessary, so replicas of an expert stay on different nodes. Where exchanges do not suffice,
    replicas are given up. All ranks must have equally many slots.

    Args:
        problem: the ranks, what they hold and the load.
        table: the sets, int32 [layers, slots] or EMPTY.
        room: the experts that each rank can hold over all layers, int64 [ranks].
        by_node: whether sets leave the others of their node never.
    """
    num_nodes = problem.num_nodes if problem.has_equal_nodes else 1
    ranks_per_node = problem.topology.num_ranks // num_nodes
    shape = (len(table), problem.topology.num_ranks, -1)
    num_experts = problem.model.num_experts
    held = with_blanks(problem.held, num_experts)
    one, per_node = np.zeros_like(problem.node_of_rank), np.arange(len(room)) // ranks_per_node
    placed = np.array(table, dtype=np.int32, order="C")
    if problem.is_new:
        for block, within in ((ranks_per_node, one), (1, per_node)):
            _deal(placed.reshape(shape), room, block, within)
    else:
        numbered = relabel(
            with_blanks(placed, num_experts),
            held,
            first_slot=problem.first_slot,
            num_nodes=num_nodes,
        )
        placed = without_blanks(numbered, num_experts)
    anywhere = () if by_node else ((1, one),)
    for block, within in ((ranks_per_node, one), (1, per_node), *anywhere):
        _exchange(placed.reshape(shape), problem.held.reshape(shape), room, block, within)
    _give_up(placed.reshape(shape), problem.load, room, per_node if by_node else one)
    if problem.is_new:
        return placed
    aligned = align(with_blanks(placed, num_experts), held, first_slot=problem.first_slot)
    return without_blanks(aligned, num_experts)


@compiled
def _deal(sets: Slots, room: Indices, block: int, within: Indices) -> None:
    """Give the largest sets of each layer to the ranks with the most room left, in place.

    `sets` is [layers, ranks, slots]. Blocks of `block` ranks stay together, and stay among the
    blocks with the same number in `within`, [ranks].
    """
    num_blocks = sets.shape[1] // block
    left = np.zeros(num_blocks)
    for rank in range(len(room)):
        left[rank // block] += room[rank]
    for layer in range(len(sets)):
        sizes = _sizes(sets[layer], block)
        before = sets[layer].copy()
        is_done = np.zeros(num_blocks, dtype=np.bool_)
        for first in range(num_blocks):
            if is_done[first]:
                continue
            group = np.flatnonzero(within[::block] == within[first * block])
            is_done[group] = True
            largest = group[np.argsort(-sizes[group], kind="mergesort")]
            roomiest = group[np.argsort(-left[group], kind="mergesort")]
            for place in range(len(group)):
                to, source = roomiest[place] * block, largest[place] * block
                sets[layer, to : to + block] = before[source : source + block]
                left[roomiest[place]] -= sizes[largest[place]]


@compiled
def _exchange(sets: Slots, held: Slots, room: Indices, block: int, within: Indices) -> None:
    """Exchange blocks of sets within layers while that lowers the experts beyond the room.

    Arguments as in `_deal`. Of exchanges that lower it equally, takes the one by which the fewest
    experts move away from the ranks that hold them.
    """
    num_blocks = sets.shape[1] // block
    over = np.zeros(num_blocks, dtype=np.int64)
    sizes = np.empty((len(sets), num_blocks), dtype=np.int64)
    for layer in range(len(sets)):
        sizes[layer] = _sizes(sets[layer], block)
        over += sizes[layer]
    for rank in range(len(room)):
        over[rank // block] -= room[rank]
    is_stuck = np.zeros(num_blocks, dtype=np.bool_)
    while True:
        full = _fullest(over, is_stuck)
        if full < 0:
            return
        layer, other = _best_exchange(sets, held, sizes, over, full, within)
        if layer < 0:
            is_stuck[full] = True
            continue
        for place in range(block):
            one, two = full * block + place, other * block + place
            kept = sets[layer, one].copy()
            sets[layer, one] = sets[layer, two]
            sets[layer, two] = kept
        less = sizes[layer, full] - sizes[layer, other]
        over[full] -= less
        over[other] += less
        sizes[layer, full] -= less
        sizes[layer, other] += less
        is_stuck[:] = False


@part
def _fullest(over: Indices, is_stuck: Bools) -> int:
    """Find the block that is furthest beyond its room and may still change, or -1."""
    full = -1
    for one in range(len(over)):
        if over[one] > 0 and not is_stuck[one] and (full < 0 or over[one] > over[full]):
            full = one
    return full


@part
def _best_exchange(  # noqa: PLR0917
    sets: Slots, held: Slots, sizes: Indices, over: Indices, full: int, within: Indices
) -> tuple[int, int]:
    """Find the layer and the other block for the best exchange with a full block, or -1."""
    block = len(within) // len(over)
    best_layer, best, gain, least = -1, -1, 0, 0
    for other in range(len(over)):
        if over[other] >= 0 or within[other * block] != within[full * block]:
            continue
        for layer in range(len(sets)):
            less = sizes[layer, full] - sizes[layer, other]
            lower = min(less, over[full]) - max(over[other] + less, 0)
            if less <= 0 or lower < max(gain, 1):
                continue
            lost = _lost(sets[layer], held[layer], full * block, other * block, block)
            if lower > gain or lost < least:
                best_layer, best, gain, least = layer, other, lower, lost
    return best_layer, best


@part
def _sizes(sets: Slots, block: int) -> Indices:
    """Count the experts of each block of a layer."""
    sizes = np.zeros(len(sets) // block, dtype=np.int64)
    for rank in range(len(sets)):
        for expert in sets[rank]:
            if expert != EMPTY:
                sizes[rank // block] += 1
    return sizes


@part
def _lost(sets: Slots, held: Slots, one: int, other: int, block: int) -> int:
    """Count the experts that no longer stay on their rank if two blocks are exchanged."""
    lost = 0
    for place in range(block):
        first, second = sets[one + place], sets[other + place]
        lost += _in_common(first, held[one + place]) + _in_common(second, held[other + place])
        lost -= _in_common(first, held[other + place]) + _in_common(second, held[one + place])
    return lost


@part
def _in_common(some: Slots, others: Slots) -> int:
    found = 0
    for expert in some:
        for other in others:
            if expert == other and expert != EMPTY:
                found += 1
    return found


@compiled
def _give_up(sets: Slots, load: Weights, room: Indices, within: Indices) -> None:
    """Empty slots of ranks without room: of spare replicas, those that weigh least once gone.

    An expert without a spare replica goes to a rank with room and an empty slot, among the ranks
    with the same number in `within`, [ranks].
    """
    for rank in range(len(room)):
        while _used(sets, rank) > room[rank]:
            layer, place = _lightest_spare(sets, load, rank)
            if layer >= 0:
                sets[layer, rank, place] = EMPTY
            elif not _move_one(sets, rank, room, within):
                return


@part
def _lightest_spare(sets: Slots, load: Weights, rank: int) -> tuple[int, int]:
    """Find the spare replica of a rank whose expert is lightest per replica without it, or -1."""
    layer, place, least = -1, -1, np.inf
    for candidate in range(len(sets)):
        counts = _counts(sets[candidate], load.shape[1])
        total = max(load[candidate].sum(), 1e-300)
        for slot in range(sets.shape[2]):
            expert = sets[candidate, rank, slot]
            if expert != EMPTY and counts[expert] > 1:
                weight = load[candidate, expert] / (counts[expert] - 1) / total
                if weight < least:
                    layer, place, least = candidate, slot, weight
    return layer, place


@part
def _move_one(sets: Slots, rank: int, room: Indices, within: Indices) -> bool:
    """Move any expert of a rank to another rank; whether there is one."""
    for other in range(len(room)):
        if other == rank or within[other] != within[rank] or _used(sets, other) >= room[other]:
            continue
        for layer in range(len(sets)):
            for slot in range(sets.shape[2]):
                expert = sets[layer, rank, slot]
                if expert == EMPTY or (sets[layer, other] == expert).any():
                    continue
                for free in range(sets.shape[2]):
                    if sets[layer, other, free] == EMPTY:
                        sets[layer, other, free] = expert
                        sets[layer, rank, slot] = EMPTY
                        return True
    return False


@part
def _used(sets: Slots, rank: int) -> int:
    used = 0
    for layer in range(len(sets)):
        for expert in sets[layer, rank]:
            if expert != EMPTY:
                used += 1
    return used


@part
def _counts(sets: Slots, num_experts: int) -> Indices:
    counts = np.zeros(num_experts, dtype=np.int64)
    for rank in range(len(sets)):
        for expert in sets[rank]:
            if expert != EMPTY:
                counts[expert] += 1
    return counts

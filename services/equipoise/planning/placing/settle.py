"""`settle`: take back the moves of a placement that its balance does not need.

A placement is as balanced as its busiest rank, and most ranks have room below that, with few slots
per rank most of all. Experts return to the ranks that hold them as long as none becomes busier than
the busiest one is.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.search_state import Counts
from equipoise.planning.placing.stay import align

ROUNDING = 1e-9
"""Load that rounding may add to a rank, in mean rank loads."""


def settle(
    problem: Problem, table: ExpertTable, held: ExpertTable, *, noise: Weights | None = None
) -> ExpertTable:
    """Return experts to where they are held; int32 [layers, slots].

    Under no kind of traffic does the busiest rank become busier. First, replicas that move anyway
    leave nodes with too many of their expert; none comes to such a node afterwards.

    Args:
        problem: the load and the ranks.
        table: a placement of every expert, int32 [layers, slots].
        held: the placement that it is to be close to, int32 [layers, slots].
        noise: the excess that chance hides, in mean rank loads, [layers]: ranks that get experts
            stay so far below the busiest one, because what looks like room may be chance.
    """
    settled = align(table, held, first_slot=problem.first_slot)
    _settle_layers(
        settled,
        np.ascontiguousarray(held),
        np.ascontiguousarray(problem.load_of_kinds),
        np.zeros(len(table)) if noise is None else noise,
        (problem.first_slot, problem.node_of_rank),
    )
    return align(settled, held, first_slot=problem.first_slot)


class _Layer(NamedTuple):
    """One layer; arrays, updated in place."""

    slots: Slots
    load: Load
    """[experts, kinds], in mean rank loads."""
    share: Load
    """Load per replica, [experts, kinds]."""
    num_replicas: Indices
    carried: Load
    """Load of each rank, [ranks, kinds]."""
    limit: Weights
    """The most that a rank may carry, [kinds]."""
    rank_of_slot: Indices
    node_of_rank: Indices
    is_held: Bools
    """Whether each rank is to hold each expert, [experts, ranks]."""
    num_here: Counts
    """Replicas of each expert on each rank, [experts, ranks]."""
    num_on_node: Indices
    """Replicas of each expert on each node, [experts, nodes]."""
    first_replica: Indices
    """The first slot of each expert, [experts], and the next one after each slot, [slots]; -1 is
    none."""
    next_replica: Indices


@compiled
def _settle_layers(
    table: Slots,
    held: Slots,
    loads: Load,
    noise: Weights,
    ranks: tuple[Indices, Indices],
) -> None:
    """`ranks` are the first slot of each, and its node."""
    first_slot, node_of_rank = ranks
    rank_of_slot = np.searchsorted(first_slot, np.arange(table.shape[1]), side="right") - 1
    for index in range(len(table)):
        layer = _begin(table[index], held[index], loads[index], rank_of_slot, node_of_rank)
        for kind in range(len(layer.limit)):
            layer.limit[kind] = layer.carried[:, kind].max() + ROUNDING - noise[index]
        _separate(layer)
        while _return(layer, held[index], first_slot):
            pass


@part
def _begin(
    slots: Slots, held: Slots, load: Load, rank_of_slot: Indices, node_of_rank: Indices
) -> _Layer:
    num_experts, num_ranks = len(load), len(node_of_rank)
    layer = _Layer(
        slots,
        load,
        np.zeros_like(load),
        np.zeros(num_experts, dtype=np.int64),
        np.zeros((num_ranks, load.shape[1])),
        np.zeros(load.shape[1]),
        rank_of_slot,
        node_of_rank,
        np.zeros((num_experts, num_ranks), dtype=np.bool_),
        np.zeros((num_experts, num_ranks), dtype=np.int16),
        np.zeros((num_experts, node_of_rank.max() + 1), dtype=np.int64),
        np.full(num_experts, -1),
        np.full(len(slots), -1),
    )
    for slot in range(len(slots) - 1, -1, -1):  # Each is put first in its list.
        if held[slot] >= 0:
            layer.is_held[held[slot], rank_of_slot[slot]] = True
        _put(layer, slots[slot], slot)
    _weigh(layer)
    return layer


@part
def _weigh(layer: _Layer) -> None:
    for expert in range(len(layer.load)):
        layer.share[expert] = layer.load[expert] / max(layer.num_replicas[expert], 1)
    layer.carried[:] = 0.0
    for slot in range(len(layer.slots)):
        layer.carried[layer.rank_of_slot[slot]] += layer.share[layer.slots[slot]]


@part
def _separate(layer: _Layer) -> None:
    """Swap replicas that move anyway off nodes that have too many of their expert."""
    slots, rank_of_slot, is_held = layer.slots, layer.rank_of_slot, layer.is_held
    for own in range(len(slots)):
        here = rank_of_slot[own]
        node = layer.node_of_rank[here]
        most = _most_on_node(layer, slots[own])
        if is_held[slots[own], here] or layer.num_on_node[slots[own], node] <= most:
            continue
        for slot in range(len(slots)):
            there = rank_of_slot[slot]
            if (
                not is_held[slots[slot], there]
                and layer.node_of_rank[there] != node
                and _may_swap(layer, own, slot)
            ):
                _swap(layer, own, slot)
                break


@part
def _return(layer: _Layer, held: Slots, first_slot: Indices) -> bool:
    """Bring experts back to each rank in turn; returns whether any came."""
    # Calls that pass the tuple cost more than what most of them would find.
    slots, rank_of_slot, is_held = layer.slots, layer.rank_of_slot, layer.is_held
    share, num_here, num_replicas = layer.share, layer.num_here, layer.num_replicas
    room, any_came = np.empty(len(layer.limit)), False
    for slot in range(len(slots)):
        rank, spared = rank_of_slot[slot], slots[slot]
        if is_held[spared, rank]:
            continue
        for kind in range(len(room)):
            room[kind] = layer.limit[kind] - layer.carried[rank, kind] + share[spared, kind]
        for wanted in range(first_slot[rank], first_slot[rank + 1]):
            expert = held[wanted]
            if expert < 0 or num_here[expert, rank]:
                continue
            fits = True
            for kind in range(len(room)):
                fits &= share[expert, kind] <= room[kind]
            came = num_replicas[spared] > 1 and _copy(layer, expert, slot)
            if came or (fits and _bring(layer, expert, slot)):
                any_came = True
                break
    return any_came


@part
def _copy(layer: _Layer, expert: int, slot: int) -> bool:
    """Overwrite a spare replica with one of an expert, if no rank gets too busy by that."""
    slots, rank_of_slot, num_replicas = layer.slots, layer.rank_of_slot, layer.num_replicas
    spared, rank = slots[slot], rank_of_slot[slot]
    node = layer.node_of_rank[rank]
    if layer.num_on_node[expert, node] >= _most_on_node(layer, expert):
        return False
    for kind in range(len(layer.limit)):
        limit, was = layer.limit[kind], layer.share[spared, kind]
        more = layer.load[expert, kind] / (num_replicas[expert] + 1)
        if layer.carried[rank, kind] - was + more > limit:
            return False
        rises = layer.load[spared, kind] / (num_replicas[spared] - 1) - was
        other = layer.first_replica[spared]
        while other >= 0:
            there = rank_of_slot[other]
            falls = layer.share[expert, kind] - more if layer.num_here[expert, there] else 0.0
            if other != slot and layer.carried[there, kind] + rises - falls > limit:
                return False
            other = layer.next_replica[other]
    _take(layer, slot)
    _put(layer, expert, slot)
    _weigh(layer)
    return True


@part
def _bring(layer: _Layer, expert: int, slot: int) -> bool:
    """Swap an expert to a slot from a rank that does not hold it."""
    rank_of_slot, is_held = layer.rank_of_slot, layer.is_held
    other = layer.first_replica[expert]
    while other >= 0:
        if not is_held[expert, rank_of_slot[other]] and _may_swap(layer, slot, other):
            _swap(layer, slot, other)
            return True
        other = layer.next_replica[other]
    return False


@part
def _may_swap(layer: _Layer, own: int, other: int) -> bool:
    """Whether two experts may change places without making a rank too busy."""
    one, two = layer.slots[own], layer.slots[other]
    here, there = layer.rank_of_slot[own], layer.rank_of_slot[other]
    has_room = _has_room(layer, two, own) and _has_room(layer, one, other)
    return has_room and _may_go(layer, one, here, there) and _may_go(layer, two, there, here)


@part
def _has_room(layer: _Layer, expert: int, slot: int) -> bool:
    """Whether the rank of a slot may carry an expert in place of the one there."""
    rank, spared = layer.rank_of_slot[slot], layer.slots[slot]
    for kind in range(len(layer.limit)):
        more = layer.share[expert, kind] - layer.share[spared, kind]
        if layer.carried[rank, kind] + more > layer.limit[kind]:
            return False
    return True


@part
def _may_go(layer: _Layer, expert: int, here: int, there: int) -> bool:
    """Whether an expert may go from a rank to another without joining its replicas."""
    node = layer.node_of_rank[there]
    return layer.num_here[expert, there] == 0 and bool(
        node == layer.node_of_rank[here]
        or layer.num_on_node[expert, node] < _most_on_node(layer, expert)
    )


@part
def _most_on_node(layer: _Layer, expert: int) -> int:
    """Count the replicas of an expert per node, if they are spread evenly."""
    num_nodes = layer.num_on_node.shape[1]
    return int((layer.num_replicas[expert] + num_nodes - 1) // num_nodes)


@part
def _swap(layer: _Layer, own: int, other: int) -> None:
    one, two = layer.slots[own], layer.slots[other]
    here, there = layer.rank_of_slot[own], layer.rank_of_slot[other]
    _take(layer, own)
    _take(layer, other)
    _put(layer, two, own)
    _put(layer, one, other)
    for kind in range(len(layer.limit)):
        less = layer.share[one, kind] - layer.share[two, kind]
        layer.carried[here, kind] -= less
        layer.carried[there, kind] += less


@part
def _put(layer: _Layer, expert: int, slot: int) -> None:
    """Fill a slot, which is in no list."""
    before, after = -1, layer.first_replica[expert]
    while after >= 0 and after < slot:
        before, after = after, layer.next_replica[after]
    layer.next_replica[slot] = after
    if before < 0:
        layer.first_replica[expert] = slot
    else:
        layer.next_replica[before] = slot
    layer.slots[slot] = expert
    _count(layer, expert, layer.rank_of_slot[slot], 1)


@part
def _take(layer: _Layer, slot: int) -> None:
    """Take the expert of a slot out of its list."""
    expert = layer.slots[slot]
    before = -1
    at = layer.first_replica[expert]
    while at != slot:
        before, at = at, layer.next_replica[at]
    if before < 0:
        layer.first_replica[expert] = layer.next_replica[slot]
    else:
        layer.next_replica[before] = layer.next_replica[slot]
    _count(layer, expert, layer.rank_of_slot[slot], -1)


@part
def _count(layer: _Layer, expert: int, rank: int, change: int) -> None:
    layer.num_replicas[expert] += change
    layer.num_here[expert, rank] += change
    layer.num_on_node[expert, layer.node_of_rank[rank]] += change

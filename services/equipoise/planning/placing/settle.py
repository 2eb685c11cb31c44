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
    )
    for slot in range(len(slots)):
        rank = rank_of_slot[slot]
        if held[slot] >= 0:
            layer.is_held[held[slot], rank] = True
        layer.num_here[slots[slot], rank] += 1
        layer.num_on_node[slots[slot], node_of_rank[rank]] += 1
        layer.num_replicas[slots[slot]] += 1
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
    slots, rank_of_slot, is_held = layer.slots, layer.rank_of_slot, layer.is_held
    any_came = False
    for slot in range(len(slots)):
        rank = rank_of_slot[slot]
        for wanted in range(first_slot[rank], first_slot[rank + 1]):
            if is_held[slots[slot], rank]:
                break
            expert = held[wanted]
            if expert >= 0 and layer.num_here[expert, rank] == 0:
                any_came |= _copy(layer, expert, slot) or _bring(layer, expert, slot)
    return any_came


@part
def _copy(layer: _Layer, expert: int, slot: int) -> bool:
    """Overwrite a spare replica with one of an expert, if no rank gets too busy by that."""
    slots, rank_of_slot, num_replicas = layer.slots, layer.rank_of_slot, layer.num_replicas
    spared, rank = slots[slot], rank_of_slot[slot]
    node = layer.node_of_rank[rank]
    if num_replicas[spared] < 2 or layer.num_on_node[expert, node] >= _most_on_node(layer, expert):
        return False
    for kind in range(len(layer.limit)):
        limit, was = layer.limit[kind], layer.share[spared, kind]
        more = layer.load[expert, kind] / (num_replicas[expert] + 1)
        if layer.carried[rank, kind] - was + more > limit:
            return False
        rises = layer.load[spared, kind] / (num_replicas[spared] - 1) - was
        for other in range(len(slots)):
            if slots[other] != spared or other == slot:
                continue
            there = rank_of_slot[other]
            falls = layer.share[expert, kind] - more if layer.num_here[expert, there] else 0.0
            if layer.carried[there, kind] + rises - falls > limit:
                return False
    num_replicas[spared] -= 1
    num_replicas[expert] += 1
    layer.num_on_node[spared, node] -= 1
    layer.num_on_node[expert, node] += 1
    layer.num_here[spared, rank] -= 1
    layer.num_here[expert, rank] += 1
    slots[slot] = expert
    _weigh(layer)
    return True


@part
def _bring(layer: _Layer, expert: int, slot: int) -> bool:
    """Swap an expert to a slot from a rank that does not hold it."""
    slots, rank_of_slot, is_held = layer.slots, layer.rank_of_slot, layer.is_held
    if not _has_room(layer, expert, slot):
        return False
    for other in range(len(slots)):
        if (
            slots[other] == expert
            and not is_held[expert, rank_of_slot[other]]
            and _may_swap(layer, slot, other)
        ):
            _swap(layer, slot, other)
            return True
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
    for expert, source, slot in ((one, own, other), (two, other, own)):
        here, there = layer.rank_of_slot[source], layer.rank_of_slot[slot]
        layer.slots[slot] = expert
        layer.carried[there] += layer.share[expert]
        layer.carried[here] -= layer.share[expert]
        layer.num_here[expert, there] += 1
        layer.num_here[expert, here] -= 1
        layer.num_on_node[expert, layer.node_of_rank[there]] += 1
        layer.num_on_node[expert, layer.node_of_rank[here]] -= 1

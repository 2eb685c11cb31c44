"""`refine`: local search after the greedy, until the busiest rank cannot be relieved.

Each step relieves that rank: first by the swap with a slot of another rank that leaves the busier
of the two least loaded; if none helps, by one more replica of one of its experts in place of a
spare replica. Each step lowers the maximum, so no result is worse than the input, and it ends.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled, part

TOLERANCE = 5e-5
"""A rank within this fraction of the mean of its block counts as even."""

WORK_PER_SLOT = 100
"""Bound on the compared pairs of slots, per slot: about twice what 288 slots need."""

MOST_WORK = 400_000
"""Bound on the compared pairs per layer: with thousands of slots little is left to gain."""


def refine(
    table: ExpertTable,
    *,
    load: Load,
    first_slot: Indices,
    block_of_rank: Indices,
    node_of_rank: Indices | None = None,
) -> ExpertTable:
    """Lower each layer's busiest rank as far as possible; int32 [layers, slots].

    The number of compared pairs is bounded, so time is at most linear in slots.

    Args:
        table: int32 [layers, slots] without needless twins.
        load: [layers, experts].
        first_slot: int64 [ranks + 1]; rank r owns slots first_slot[r] to first_slot[r + 1] - 1.
        block_of_rank: int64 [ranks]; experts never leave their block (a node, or all ranks).
        node_of_rank: int64 [ranks]. If given, replicas of an expert are first swapped to different
            nodes where possible and stay there; the result can then be worse than the input.
    """
    refined = np.array(table, dtype=np.int32, order="C")
    nodes = np.zeros_like(block_of_rank) if node_of_rank is None else node_of_rank
    _refine_layers(refined, load, first_slot, block_of_rank, nodes)
    return refined


class _Search(NamedTuple):
    """One layer during the search; arrays, updated in place."""

    slots: Slots
    load: Weights
    num_replicas: Indices
    share: Weights
    """Load of one replica of each expert, [experts]."""
    carried: Weights
    """Load of each rank, [ranks]."""
    first_slot: Indices
    rank_of_slot: Indices
    block_of_rank: Indices
    node_of_rank: Indices
    num_on_node: Indices
    """Replicas of each expert on each node, [experts, nodes]."""
    most_on_node: Indices
    """Most replicas of each expert per node if they are spread evenly, [experts]."""


@compiled
def _refine_layers(
    table: Slots,
    load: Weights,
    first_slot: Indices,
    block_of_rank: Indices,
    node_of_rank: Indices,
) -> None:
    num_nodes = node_of_rank.max() + 1
    rank_of_slot = np.searchsorted(first_slot, np.arange(table.shape[1]), side="right") - 1
    for index in range(len(table)):
        num_replicas = np.bincount(table[index], minlength=load.shape[1])
        layer = _Search(
            table[index],
            load[index],
            num_replicas,
            load[index] / np.maximum(num_replicas, 1),
            np.zeros(len(block_of_rank)),
            first_slot,
            rank_of_slot,
            block_of_rank,
            node_of_rank,
            np.zeros((load.shape[1], num_nodes), dtype=np.int64),
            (num_replicas + num_nodes - 1) // num_nodes,
        )
        for slot in range(len(rank_of_slot)):
            layer.num_on_node[layer.slots[slot], node_of_rank[rank_of_slot[slot]]] += 1
        _weigh_ranks(layer)
        work = min(WORK_PER_SLOT * len(rank_of_slot), MOST_WORK)
        work -= _separate(layer, work)
        _refine(layer, work)


@part
def _separate(layer: _Search, work: int) -> int:
    """Swap replicas off nodes that hold too many of their expert; returns the compared pairs.

    Takes the partner slot that leaves the busier rank least loaded.
    """
    slots, carried, rank_of_slot = layer.slots, layer.carried, layer.rank_of_slot
    spent = 0
    for own in range(len(slots) if layer.num_on_node.shape[1] > 1 else 0):
        expert, here = slots[own], rank_of_slot[own]
        node = layer.node_of_rank[here]
        if spent >= work or layer.num_on_node[expert, node] <= layer.most_on_node[expert]:
            continue
        spent += len(slots)
        best, other = np.inf, -1
        for slot in range(len(slots)):
            there = rank_of_slot[slot]
            difference = layer.share[expert] - layer.share[slots[slot]]
            busier = max(carried[here] - difference, carried[there] + difference)
            if (
                busier < best
                and layer.block_of_rank[there] == layer.block_of_rank[here]
                and layer.node_of_rank[there] != node
                and _may_join(layer, expert, here, there)
                and _may_join(layer, slots[slot], there, here)
            ):
                best, other = busier, slot
        if other >= 0:
            _swap(layer, own, other)
    return spent


@part
def _may_join(layer: _Search, expert: int, here: int, there: int) -> bool:
    """Whether a replica may go from one rank to another without joining its twin."""
    from_node, to_node = layer.node_of_rank[here], layer.node_of_rank[there]
    if from_node != to_node and layer.num_on_node[expert, to_node] >= layer.most_on_node[expert]:
        return False
    return not _holds(layer, there, expert)


@part
def _swap(layer: _Search, own: int, other: int) -> None:
    slots, here, there = layer.slots, layer.rank_of_slot[own], layer.rank_of_slot[other]
    difference = layer.share[slots[own]] - layer.share[slots[other]]
    layer.carried[here] -= difference
    layer.carried[there] += difference
    layer.num_on_node[slots[own], layer.node_of_rank[here]] -= 1
    layer.num_on_node[slots[other], layer.node_of_rank[there]] -= 1
    slots[own], slots[other] = slots[other], slots[own]
    layer.num_on_node[slots[own], layer.node_of_rank[here]] += 1
    layer.num_on_node[slots[other], layer.node_of_rank[there]] += 1


@part
def _refine(layer: _Search, work: int) -> None:
    slots, carried = layer.slots, layer.carried
    enough = _enough(layer)
    while work > 0:
        busiest = int(carried.argmax())
        if carried[busiest] <= enough[layer.block_of_rank[busiest]]:
            return
        own, other, spent = _best_swap(layer, busiest)
        work -= spent
        if own >= 0:
            _swap(layer, own, other)
            continue
        expert, other, spent = _best_replica(layer, busiest)
        work -= spent
        if other < 0:
            expert, other, spent = _best_relief(layer, busiest)
            work -= spent
        if other < 0:
            return
        node = layer.node_of_rank[layer.rank_of_slot[other]]
        _recount(layer, slots[other], node, -1)
        _recount(layer, expert, node, 1)
        slots[other] = expert
        _weigh_ranks(layer)


@part
def _recount(layer: _Search, expert: int, node: int, by: int) -> None:
    """Add `by` replicas of an expert on one node."""
    num_nodes = layer.num_on_node.shape[1]
    layer.num_on_node[expert, node] += by
    layer.num_replicas[expert] += by
    layer.share[expert] = layer.load[expert] / layer.num_replicas[expert]
    layer.most_on_node[expert] = (layer.num_replicas[expert] + num_nodes - 1) // num_nodes


@part
def _weigh_ranks(layer: _Search) -> None:
    layer.carried[:] = 0.0
    for slot in range(len(layer.slots)):
        layer.carried[layer.rank_of_slot[slot]] += layer.share[layer.slots[slot]]


@part
def _enough(layer: _Search) -> Weights:
    """Compute the load up to which a rank of each block needs no relief, [blocks]."""
    num_blocks = layer.block_of_rank.max() + 1
    total, num_ranks = np.zeros(num_blocks), np.zeros(num_blocks)
    for rank in range(len(layer.carried)):
        total[layer.block_of_rank[rank]] += layer.carried[rank]
        num_ranks[layer.block_of_rank[rank]] += 1
    enough: Weights = total / np.maximum(num_ranks, 1) * (1.0 + TOLERANCE)
    return enough


@part
def _best_swap(layer: _Search, busiest: int) -> tuple[int, int, int]:
    """Find a slot of the busiest rank and one of another to swap, or -1; and the compared pairs.

    A swap leaves at least the mean of both ranks, so a good first swap, with the least loaded
    rank, rules out most others.
    """
    slots, carried, first_slot = layer.slots, layer.carried, layer.first_slot
    own, other, spent = -1, -1, len(carried)
    most = carried[busiest]
    best = most * (1.0 - 1e-9)
    lightest = _lightest_beside(layer, busiest)
    for turn in range(-1, len(carried)):
        rank = lightest if turn < 0 else turn
        if (
            rank < 0
            or (most + carried[rank]) / 2 >= best
            or layer.block_of_rank[rank] != layer.block_of_rank[busiest]
        ):
            continue
        for mine in range(first_slot[busiest], first_slot[busiest + 1]):
            mine_share = layer.share[slots[mine]]
            for theirs in range(first_slot[rank], first_slot[rank + 1]):
                difference = mine_share - layer.share[slots[theirs]]
                busier = max(most - difference, carried[rank] + difference)
                if (
                    busier < best
                    and _may_join(layer, slots[mine], busiest, rank)
                    and _may_join(layer, slots[theirs], rank, busiest)
                ):
                    best, own, other = busier, mine, theirs
        spent += (first_slot[busiest + 1] - first_slot[busiest]) * (
            first_slot[rank + 1] - first_slot[rank]
        )
    return own, other, spent


@part
def _lightest_beside(layer: _Search, busiest: int) -> int:
    """Find the least loaded other rank of the busiest one's block, or -1."""
    lightest = -1
    for rank in range(len(layer.carried)):
        if (
            rank != busiest
            and layer.block_of_rank[rank] == layer.block_of_rank[busiest]
            and (lightest < 0 or layer.carried[rank] < layer.carried[lightest])
        ):
            lightest = rank
    return lightest


@part
def _best_replica(layer: _Search, busiest: int) -> tuple[int, int, int]:
    """Find an expert of the busiest rank and a slot for one more replica, or -1; and the pairs.

    The slot must hold an expert with a spare replica. The other replicas of that expert then carry
    more, and those of the first expert less.
    """
    slots, carried, first_slot = layer.slots, layer.carried, layer.first_slot
    most = carried[busiest]
    best = most * (1.0 - 1e-9)
    chosen, other, spent = -1, -1, len(slots)
    first_holder, second_holder = _busiest_holders(layer, busiest)
    for slot in range(len(slots)):
        spared, rank = slots[slot], layer.rank_of_slot[slot]
        if (
            layer.num_replicas[spared] < 2
            or rank == busiest
            or layer.block_of_rank[rank] != layer.block_of_rank[busiest]
        ):
            continue
        holder = second_holder[spared] if first_holder[spared] == rank else first_holder[spared]
        rises = layer.load[spared] / (layer.num_replicas[spared] - 1) - layer.share[spared]
        rises_most = carried[holder] + rises if holder >= 0 else 0.0
        if rises_most >= best:
            continue
        rises_here = rises if _holds(layer, busiest, spared) else 0.0
        spent += first_slot[busiest + 1] - first_slot[busiest]
        for mine in range(first_slot[busiest], first_slot[busiest + 1]):
            expert = slots[mine]
            share = layer.load[expert] / (layer.num_replicas[expert] + 1)
            busier = max(
                rises_most,
                carried[rank] - layer.share[spared] + share,
                most - layer.share[expert] + share + rises_here,
            )
            if busier < best and _may_arise(layer, expert, rank):
                best, chosen, other = busier, int(expert), slot
    return chosen, other, spent


@part
def _best_relief(layer: _Search, busiest: int) -> tuple[int, int, int]:
    """Find a replica for the busiest rank to drop and its new expert, or -1; and the pairs.

    An expert with many replicas need not be on a rank that also has an expert without replicas.
    """
    slots, carried = layer.slots, layer.carried
    best = carried[busiest] * (1.0 - 1e-9)
    chosen, other, spent = -1, -1, len(slots)
    holder, _ = _busiest_holders(layer, busiest)
    for slot in range(layer.first_slot[busiest], layer.first_slot[busiest + 1]):
        spared = slots[slot]
        if layer.num_replicas[spared] < 2:
            continue
        rises = layer.load[spared] / (layer.num_replicas[spared] - 1) - layer.share[spared]
        rises_most = carried[holder[spared]] + rises
        if rises_most >= best:
            continue
        spent += len(slots)
        for source in range(len(slots)):
            expert, rank = slots[source], layer.rank_of_slot[source]
            share = layer.load[expert] / (layer.num_replicas[expert] + 1)
            busier = max(rises_most, carried[busiest] - layer.share[spared] + share)
            if (
                busier < best
                and layer.block_of_rank[rank] == layer.block_of_rank[busiest]
                and _may_arise(layer, expert, busiest)
            ):
                best, chosen, other = busier, int(expert), slot
    return chosen, other, spent


@part
def _may_arise(layer: _Search, expert: int, rank: int) -> bool:
    """Whether one more replica of an expert may be on a rank."""
    num_nodes = layer.num_on_node.shape[1]
    most_on_node = (layer.num_replicas[expert] + num_nodes) // num_nodes
    return layer.num_on_node[expert, layer.node_of_rank[rank]] < most_on_node and not _holds(
        layer, rank, expert
    )


@part
def _busiest_holders(layer: _Search, excluding: int) -> tuple[Indices, Indices]:
    """Find the two most loaded ranks that hold each expert, except one; [experts], or -1."""
    carried = layer.carried
    first = np.full(len(layer.load), -1)
    second = np.full(len(layer.load), -1)
    for slot in range(len(layer.slots)):
        expert, rank = layer.slots[slot], layer.rank_of_slot[slot]
        if rank == excluding:
            continue
        if first[expert] < 0 or carried[rank] > carried[first[expert]]:
            second[expert] = first[expert]
            first[expert] = rank
        elif second[expert] < 0 or carried[rank] > carried[second[expert]]:
            second[expert] = rank
    return first, second


@part
def _holds(layer: _Search, rank: int, expert: int) -> bool:
    for slot in range(layer.first_slot[rank], layer.first_slot[rank + 1]):
        if layer.slots[slot] == expert:
            return True
    return False

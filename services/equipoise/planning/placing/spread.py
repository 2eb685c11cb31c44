"""`spread`: exchange whole ranks between nodes, so that replicas of an expert are on several.

The load of each rank stays as it is, so unlike a swap of single replicas this costs no balance.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Slots
from equipoise.planning.placing.compiled import compiled, part

MOST_PASSES = 3
"""How often each rank may change places. Once leaves 20 of 717 experts with several replicas on one
node (48 ranks, 2 nodes, 40 layers of 64 experts), three times none."""


def spread(
    table: ExpertTable, *, num_experts: int, first_slot: Indices, node_of_rank: Indices
) -> ExpertTable:
    """Let fewer replicas be on nodes with too many of their expert; int32 [layers, slots].

    Each rank in turn changes places with the one that lowers their number most.

    Args:
        table: int32 [layers, slots] without needless twins.
        num_experts: the number of experts.
        first_slot: int64 [ranks + 1]; rank r owns slots first_slot[r] to first_slot[r + 1] - 1.
            Only ranks with equally many slots change places.
        node_of_rank: int64 [ranks].
    """
    spread_out = np.array(table, dtype=np.int32, order="C")
    _spread_layers(spread_out, num_experts, first_slot, node_of_rank)
    return spread_out


class _Layer(NamedTuple):
    slots: Slots
    first_slot: Indices
    node_of_rank: Indices
    num_on_node: Indices
    """Replicas of each expert on each node, [experts, nodes]."""
    most_on_node: Indices
    """Most replicas of each expert per node if they are spread evenly, [experts]."""


@compiled
def _spread_layers(
    table: Slots, num_experts: int, first_slot: Indices, node_of_rank: Indices
) -> None:
    num_ranks, num_nodes = len(node_of_rank), node_of_rank.max() + 1
    for index in range(len(table)):
        num_on_node = np.zeros((num_experts, num_nodes), dtype=np.int64)
        for rank in range(num_ranks):
            for expert in table[index, first_slot[rank] : first_slot[rank + 1]]:
                num_on_node[expert, node_of_rank[rank]] += 1
        most_on_node = (num_on_node.sum(axis=1) + num_nodes - 1) // num_nodes
        layer = _Layer(table[index], first_slot, node_of_rank, num_on_node, most_on_node)
        for _ in range(MOST_PASSES):
            is_better = False
            for rank in range(num_ranks):
                other = _best_exchange(layer, rank)
                if other >= 0:
                    _exchange(layer, rank, other)
                    is_better = True
            if not is_better:
                break


@part
def _best_exchange(layer: _Layer, rank: int) -> int:
    """Find the rank to change places with, or -1."""
    too_many, node = 0, layer.node_of_rank[rank]
    for expert in _experts(layer, rank):
        too_many += layer.num_on_node[expert, node] > layer.most_on_node[expert]
    most, best = 0, -1
    for other in range(len(layer.node_of_rank)):
        if most >= too_many:
            break
        is_alike = len(_experts(layer, other)) == len(_experts(layer, rank))
        if is_alike and layer.node_of_rank[other] != node:
            fewer = _fewer(layer, rank, other) + _fewer(layer, other, rank)
            if fewer > most:
                most, best = fewer, other
    return best


@part
def _fewer(layer: _Layer, rank: int, other: int) -> int:
    """By how many replicas too many falls if those of a rank go to the node of another."""
    here, there = layer.node_of_rank[rank], layer.node_of_rank[other]
    fewer = 0
    for expert in _experts(layer, rank):
        leaves = layer.num_on_node[expert, here] > layer.most_on_node[expert]
        joins = layer.num_on_node[expert, there] >= layer.most_on_node[expert]
        if leaves != joins and not _holds(layer, other, expert):
            fewer += 1 if leaves else -1
    return fewer


@part
def _holds(layer: _Layer, rank: int, expert: int) -> bool:
    for slot in range(layer.first_slot[rank], layer.first_slot[rank + 1]):
        if layer.slots[slot] == expert:
            return True
    return False


@part
def _exchange(layer: _Layer, rank: int, other: int) -> None:
    here, there = layer.node_of_rank[rank], layer.node_of_rank[other]
    mine, theirs = _experts(layer, rank), _experts(layer, other)
    for position in range(len(mine)):
        layer.num_on_node[mine[position], here] -= 1
        layer.num_on_node[mine[position], there] += 1
        layer.num_on_node[theirs[position], there] -= 1
        layer.num_on_node[theirs[position], here] += 1
        mine[position], theirs[position] = theirs[position], mine[position]


@part
def _experts(layer: _Layer, rank: int) -> Slots:
    return layer.slots[layer.first_slot[rank] : layer.first_slot[rank + 1]]

"""Compiled sums over whole placements: replicas, load by rank, load by expert group and node."""

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable, Indices, Load, Slots
from equipoise.planning.placing.compiled import compiled, part


@compiled
def count_replicas_of(table: ExpertTable, num_experts: int) -> Indices:
    """Count the slots that hold each expert, int64 [layers, experts]."""
    counts = np.zeros((len(table), num_experts), dtype=np.int64)
    for layer in range(len(table)):
        _count(table[layer], counts[layer])
    return counts


@compiled
def split_by_rank(table: ExpertTable, load: Load, rank_of_slot: Indices) -> Load:
    """Split a load, [layers, experts], evenly over replicas and sum by rank, [layers, ranks]."""
    sums = np.zeros((len(table), rank_of_slot[-1] + 1))
    num_replicas = np.empty(load.shape[1], dtype=np.int64)
    for layer in range(len(table)):
        num_replicas[:] = 0
        _count(table[layer], num_replicas)
        for slot in range(len(rank_of_slot)):
            expert = table[layer, slot]
            if expert != EMPTY:
                sums[layer, rank_of_slot[slot]] += load[layer, expert] / num_replicas[expert]
    return sums


@compiled
def split_by_group_and_node(
    table: ExpertTable, load: Load, node_of_slot: Indices, num_groups: int
) -> Load:
    """Split a load evenly and sum by expert group and node, [layers, groups, nodes]."""
    group_of_expert = np.arange(load.shape[1]) // (load.shape[1] // num_groups)
    sums = np.zeros((len(table), num_groups, node_of_slot.max() + 1))
    num_replicas = np.empty(load.shape[1], dtype=np.int64)
    for layer in range(len(table)):
        num_replicas[:] = 0
        _count(table[layer], num_replicas)
        for slot in range(len(node_of_slot)):
            expert = table[layer, slot]
            if expert != EMPTY:
                part = load[layer, expert] / num_replicas[expert]
                sums[layer, group_of_expert[expert], node_of_slot[slot]] += part
    return sums


@part
def _count(slots: Slots, counts: Indices) -> None:
    """Add the slots of each expert to `counts`, [experts]."""
    for expert in slots:
        if expert != EMPTY:
            counts[expert] += 1

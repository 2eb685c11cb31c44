"""Sums over a placement: by rank, by node and expert group. All take whole tables, in one pass."""

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Load
from equipoise.planning.placing.compiled import compiled, part


@compiled
def count_replicas_of(table: ExpertTable, num_experts: int) -> Indices:
    """Slots that hold each expert, int64 [layers, experts]."""
    counts = np.zeros((len(table), num_experts), dtype=np.int64)
    for layer in range(len(table)):
        for expert in table[layer]:
            counts[layer, expert] += 1
    return counts


@compiled
def split_by_rank(table: ExpertTable, load: Load, rank_of_slot: Indices) -> Load:
    """What ranks carry of a load, [layers, experts], if it splits evenly; [layers, ranks]."""
    sums = np.zeros((len(table), rank_of_slot[-1] + 1))
    num_replicas = np.empty(load.shape[1], dtype=np.int64)
    for layer in range(len(table)):
        num_replicas[:] = 0
        for expert in table[layer]:
            num_replicas[expert] += 1
        for slot in range(len(rank_of_slot)):
            expert = table[layer, slot]
            sums[layer, rank_of_slot[slot]] += load[layer, expert] / num_replicas[expert]
    return sums


@compiled
def split_by_group_and_node(
    table: ExpertTable, load: Load, node_of_slot: Indices, num_groups: int
) -> Load:
    """The same for what nodes carry of each group of experts; [layers, groups, nodes]."""
    group_of_expert = np.arange(load.shape[1]) // (load.shape[1] // num_groups)
    sums = np.zeros((len(table), num_groups, node_of_slot.max() + 1))
    num_replicas = np.empty(load.shape[1], dtype=np.int64)
    for layer in range(len(table)):
        num_replicas[:] = 0
        for expert in table[layer]:
            num_replicas[expert] += 1
        for slot in range(len(node_of_slot)):
            expert = table[layer, slot]
            part = load[layer, expert] / num_replicas[expert]
            sums[layer, group_of_expert[expert], node_of_slot[slot]] += part
    return sums


@compiled
def sum_by_rank(table: ExpertTable, of_replica: Load, rank_of_slot: Indices) -> Load:
    """Sum a value that each replica of an expert has, [layers, experts]; [layers, ranks]."""
    sums = np.zeros((len(table), rank_of_slot[-1] + 1))
    for layer in range(len(table)):
        for slot in range(len(rank_of_slot)):
            sums[layer, rank_of_slot[slot]] += of_replica[layer, table[layer, slot]]
    return sums


def sum_slots_by_rank(of_slot: Load, first_slot: Indices) -> Load:
    """Sum a value that each slot has, [layers, slots], over slots of a rank; [layers, ranks]."""
    return np.add.reduceat(of_slot, first_slot[:-1], axis=1)


MOST_SUMMED = 128
"""Slots of a rank at most for `sum_each_by_rank`: NumPy halves what is longer."""


@compiled
def sum_each_by_rank(table: ExpertTable, loads: Load, first_slot: Indices) -> Load:
    """What ranks carry of several loads, [loads, layers, experts], if each splits evenly.

    The result is [loads, layers, ranks]. Numbers are added in the order of `np.add.reduceat`, so
    that decisions made with either are the same to the last bit.
    """
    num_loads, num_layers, num_experts = loads.shape
    sums = np.empty((num_loads, num_layers, len(first_slot) - 1))
    num_replicas = np.empty(num_experts, dtype=np.int64)
    of_slot, lanes = np.empty(table.shape[1]), np.empty(_LANES)
    for layer in range(num_layers):
        num_replicas[:] = 0
        for expert in table[layer]:
            num_replicas[expert] += 1
        for index in range(num_loads):
            for slot in range(len(of_slot)):
                expert = table[layer, slot]
                of_slot[slot] = loads[index, layer, expert] / num_replicas[expert]
            for rank in range(len(first_slot) - 1):
                sums[index, layer, rank] = _sum(
                    of_slot, first_slot[rank], first_slot[rank + 1], lanes
                )
    return sums


_LANES = 8


@part
def _sum(values: Load, begin: int, end: int, lanes: Load) -> float:
    """The first number and, on top, the sum of the others, in eight lanes if they fill these."""
    total, at = -0.0, begin + 1
    if at + _LANES <= end:
        for lane in range(_LANES):
            lanes[lane] = values[at + lane]
        at += _LANES
        while at + _LANES <= end:
            for lane in range(_LANES):
                lanes[lane] += values[at + lane]
            at += _LANES
        total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + (
            (lanes[4] + lanes[5]) + (lanes[6] + lanes[7])
        )
    while at < end:
        total += values[at]
        at += 1
    whole: float = values[begin] + total
    return whole

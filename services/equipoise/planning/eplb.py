"""The published expert-parallel load balancer: replicate hot experts, pack replicas on ranks.

Source of the idea: DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB),
described in its README and in the DeepSeek-V3 technical report, section 3.4. Written anew from the
description; all layers are planned at once. Its plans are those of the published program (recorded
in the tests), twins on one rank included: repairing them is the planner's work.
"""

import numpy as np
import numpy.typing as npt

from equipoise.planning.layout import ExpertTable
from equipoise.planning.load import Load

Indices = npt.NDArray[np.int64]


def eplb(
    load: Load,
    *,
    num_slots: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    hierarchical: bool,
) -> ExpertTable:
    """Place experts on slots so that ranks carry even loads; int32 [layers, slots].

    `load` is [layers, experts] in any unit. Hierarchical placement gives each node whole expert
    groups, replicates within the node, then packs the node's replicas on its ranks. Global
    placement does the same with one group and one node.
    """
    num_layers, num_experts = load.shape
    if not hierarchical:
        num_groups = num_nodes = 1
    assert num_slots >= num_experts, "every expert needs a slot"
    assert num_experts % num_groups == 0, "experts divide into groups"
    assert num_groups % num_nodes == 0, "groups divide over nodes"
    assert num_ranks % num_nodes == 0, "ranks divide over nodes"
    assert num_slots % num_ranks == 0, "slots divide over ranks"

    # From here on a row is one node of one layer, and experts are counted within their row.
    expert_in_row = _experts_of_nodes(load, num_groups=num_groups, num_nodes=num_nodes)
    row_load = np.take_along_axis(load, expert_in_row, axis=1).reshape(num_layers * num_nodes, -1)
    replica, num_replicas = _replicate(row_load, num_slots=num_slots // num_nodes)
    replica_load = np.take_along_axis(row_load / num_replicas, replica, axis=1)
    packed = _pack(replica_load, num_packs=num_ranks // num_nodes)

    slots_in_row = np.take_along_axis(replica, packed, axis=1)
    table = np.take_along_axis(expert_in_row.reshape(len(row_load), -1), slots_in_row, axis=1)
    return table.reshape(num_layers, num_slots).astype(np.int32)


def _experts_of_nodes(load: Load, *, num_groups: int, num_nodes: int) -> Indices:
    """Experts in the order of the nodes that take their groups, [layers, experts]."""
    num_layers, num_experts = load.shape
    size = num_experts // num_groups
    group_load = load.reshape(num_layers, num_groups, size).sum(axis=2)
    groups = _pack(group_load, num_packs=num_nodes)
    experts: Indices = groups[:, :, None] * size + np.arange(size)
    return experts.reshape(num_layers, num_experts)


def _replicate(load: Load, *, num_slots: int) -> tuple[Indices, Indices]:
    """Give every spare slot to the expert whose replicas carry most.

    Returns experts [rows, slots], each once in order and then the extra replicas as they were
    given, and replicas per expert [rows, experts].
    """
    num_rows, num_experts = load.shape
    rows = np.arange(num_rows)
    experts = np.empty((num_rows, num_slots), dtype=np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    num_replicas = np.ones((num_rows, num_experts), dtype=np.int64)
    share = load.astype(np.float64, copy=True)
    for slot in range(num_experts, num_slots):
        hottest = share.argmax(axis=1)
        experts[:, slot] = hottest
        num_replicas[rows, hottest] += 1
        share[rows, hottest] = load[rows, hottest] / num_replicas[rows, hottest]
    return experts, num_replicas


def _pack(weight: Load, *, num_packs: int) -> Indices:
    """Deal items, heaviest first, each into the lightest pack with room; packs get equally many.

    `weight` is [rows, items]. Returns the items pack by pack, [rows, items].
    """
    num_rows, num_items = weight.shape
    room = num_items // num_packs
    if room == 1:  # Nothing to balance: the order is kept.
        return np.tile(np.arange(num_items), (num_rows, 1))
    rows = np.arange(num_rows)
    heaviest_first = np.argsort(-weight, axis=1, kind="stable")
    packed = np.empty((num_rows, num_packs, room), dtype=np.int64)
    pack_weight = np.zeros((num_rows, num_packs))  # Infinite once a pack is full.
    fill = np.zeros((num_rows, num_packs), dtype=np.int64)
    for item in heaviest_first.T:
        pack = pack_weight.argmin(axis=1)
        position = fill[rows, pack]
        packed[rows, pack, position] = item
        fill[rows, pack] = position + 1
        pack_weight[rows, pack] += np.where(position + 1 == room, np.inf, weight[rows, item])
    return packed.reshape(num_rows, num_items)

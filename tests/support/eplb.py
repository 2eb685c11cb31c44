"""The published algorithm as one call, from the steps that the planner uses."""

import numpy as np

from equipoise.planning.placing.eplb import deal_groups, place


def eplb(
    load,
    *,
    num_slots,
    num_groups,
    num_nodes,
    num_ranks,
    hierarchical,
):
    """Place experts on slots so that ranks carry even loads; int32 [layers, slots].

    `load` is [layers, experts] in any unit. Hierarchical placement gives each node whole expert
    groups, replicates within the node, then packs the node's replicas on its ranks. Global
    placement does the same with one group and one node.
    """
    if not hierarchical:
        num_groups = num_nodes = 1
    groups = deal_groups(load, num_groups=num_groups, num_nodes=num_nodes)
    slots_of_rank = np.full(num_ranks, num_slots // num_ranks, dtype=np.int64)
    assert num_slots % num_ranks == 0, "slots divide over ranks"
    return place(load, groups=groups, num_nodes=num_nodes, slots_of_rank=slots_of_rank)

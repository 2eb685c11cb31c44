"""`place_pooled_by_node`: layers with different numbers of slots, each expert group on one node.

A node's experts of a layer are a layer of their own on the node's ranks, so each is placed with
several numbers of slots as in `pooled`. A step waits for the busiest node, so only that node's
slots shorten it; the number of slots therefore differs between the nodes of a layer, too. Which
node has which groups does not change the balance of a layer, so whole nodes' sets are exchanged
until each has room for its own.
"""

from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable, Indices, Load
from equipoise.planning.placing.from_scratch import nodes_of_groups
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.sized import Sized, lower_hull, placed_with_sizes
from equipoise.planning.topology import Topology


def obstacle_to_pooling_by_node(problem: Problem) -> str | None:
    """Return why groups cannot be kept on nodes in shared places; None if they can."""
    if obstacle := problem.obstacle_to_hierarchy():
        return obstacle
    model, places = problem.model, np.array(problem.topology.places_of_rank)
    least = model.num_layers * model.num_experts // problem.num_nodes
    per_node = places.reshape(problem.num_nodes, -1).sum(axis=1)
    if per_node.min() < least:
        node = problem.topology.nodes[int(per_node.argmin())]
        return f"node {node} has {per_node.min()} places, fewer than the {least} experts of a node"
    return None


def place_pooled_by_node(problem: Problem, *, num_places: int) -> ExpertTable:
    """Place each expert group on one node, in `num_places` over all layers, [layers, slots].

    How many places each rank has is not considered.
    """
    num_nodes, num_layers = problem.num_nodes, problem.model.num_layers
    experts = _experts_of_nodes(problem)
    rows = _rows(problem, experts)
    sizes = list(placed_with_sizes(rows, num_places=num_places))
    node_load = rows.load.sum(axis=1).reshape(num_layers, num_nodes)
    weight = node_load / np.maximum(node_load.sum(axis=1, keepdims=True), 1e-300) * num_nodes
    busiest = np.stack([one.busiest.reshape(num_layers, num_nodes) * weight for one in sizes])
    chosen = _choose(sizes, busiest, num_places=num_places)
    local = np.stack([sizes[size].placed.table[row] for row, size in enumerate(chosen.ravel())])
    of_row = np.take_along_axis(experts, np.maximum(local, 0).astype(np.int64), axis=1)
    table = np.where(local == EMPTY, np.int32(EMPTY), of_row.astype(np.int32))
    return table.reshape(num_layers, -1)


def _experts_of_nodes(problem: Problem) -> Indices:
    """The experts of each node's groups, int64 [layers x nodes, experts of a node]."""
    size = problem.model.num_experts // problem.model.num_groups
    groups = nodes_of_groups(problem)
    experts = groups[:, :, None] * size + np.arange(size)
    return experts.reshape(len(groups) * problem.num_nodes, -1)


def _rows(problem: Problem, experts: Indices) -> Problem:
    """Each node's part of each layer as a layer of ranks that hold nothing."""
    topology, num_rows = problem.topology, len(experts)
    layer = np.repeat(np.arange(problem.model.num_layers), problem.num_nodes)
    num_ranks = topology.num_ranks // problem.num_nodes
    narrow = Topology(
        node_of_rank=(topology.node_of_rank[0],) * num_ranks, slots_per_rank=topology.slots_per_rank
    )
    return replace(
        problem,
        load=np.ascontiguousarray(problem.load[layer[:, None], experts]),
        kinds=tuple(kind[layer[:, None], experts] for kind in problem.kinds),
        model=replace(
            problem.model, num_layers=num_rows, num_experts=experts.shape[1], num_groups=1
        ),
        topology=narrow,
        held=np.full((num_rows, narrow.num_slots), EMPTY, dtype=np.int32),
        held_shares=None,
        is_new=True,
    )


def _choose(sizes: list[Sized], busiest: Load, *, num_places: int) -> Indices:
    """Choose a size for each node of each layer, [layers, nodes]; `busiest` is [sizes, ...].

    The busiest node of a layer gets more slots, the layer first that this relieves most per slot.
    """
    num_slots = [one.num_slots for one in sizes]
    reached = np.zeros(busiest.shape[1:], dtype=np.int64)
    hulls = [
        [lower_hull(list(zip(num_slots, column, strict=True))) for column in layer]
        for layer in busiest.transpose(1, 2, 0).tolist()
    ]
    left = num_places - num_slots[0] * reached.size

    def step(layer: int) -> tuple[float, int, int, int] | None:
        """The next step of a layer's busiest node; None if it has no other."""
        now = np.take_along_axis(busiest[:, layer], reached[layer][None], axis=0)[0]
        node = int(now.argmax())
        size = next((one for one in hulls[layer][node] if one > reached[layer, node]), None)
        if size is None:
            return None
        rise = float(busiest[size, layer, node] - now[node])
        return rise / (num_slots[size] - num_slots[reached[layer, node]]), layer, node, size

    steps = [one for one in map(step, range(len(reached))) if one is not None]
    heapify(steps)
    while steps:
        _, layer, node, size = heappop(steps)
        more = num_slots[size] - num_slots[reached[layer, node]]
        if more > left:
            continue  # A smaller step of another layer may still fit.
        left -= more
        reached[layer, node] = size
        if (following := step(layer)) is not None:
            heappush(steps, following)
    return reached

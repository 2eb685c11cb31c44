"""`plan`: the layout that a load asks for, as close as possible to the one in use."""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.balance import balancedness, balancedness_per_layer, rank_loads
from equipoise.planning.eplb import eplb
from equipoise.planning.layout import ExpertTable, Layout, contiguous_layout
from equipoise.planning.load import Load
from equipoise.planning.policy import Algorithm
from equipoise.planning.stay import align, relabel
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.twins import repair_twins

LEAST_LAYER_GAIN = 0.002
"""Balancedness that a layer must gain for its experts to move: below this, averages only jitter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A valid placement, int32 [layers, slots], and the balancedness it has on the load it is for.

    `algorithm` is the one that made it, never `auto`.
    """

    expert_of_slot: ExpertTable
    algorithm: Algorithm
    balancedness: float
    reason: str


def plan(
    load: Load,
    *,
    model: ModelShape,
    topology: Topology,
    current: Layout | None,
    algorithm: Algorithm,
) -> Plan:
    """Place experts so that ranks carry even parts of `load`, [layers, experts] in any unit.

    A layer keeps its current placement (the contiguous one, if there is none) unless it gains
    something, so a layer without load never moves and no plan is worse than what is there.
    `auto` makes both plans and keeps the more balanced; hierarchical wins ties.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    assert load.shape == (model.num_layers, model.num_experts), "a load per layer and expert"
    start = current or contiguous_layout(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        slots_per_rank=topology.slots_per_rank,
    )
    obstacle = _obstacle_to_hierarchy(model, topology)
    if algorithm is Algorithm.GLOBAL:
        return _plan_by(load, start, model, topology, hierarchical=False)
    if obstacle is not None:
        fallback = _plan_by(load, start, model, topology, hierarchical=False)
        return _because(fallback, f"{fallback.reason}; not hierarchical: {obstacle}")
    hierarchical = _plan_by(load, start, model, topology, hierarchical=True)
    if algorithm is Algorithm.HIERARCHICAL:
        return hierarchical
    other = _plan_by(load, start, model, topology, hierarchical=False)
    winner, loser = (
        (hierarchical, other)
        if hierarchical.balancedness >= other.balancedness
        else (other, hierarchical)
    )
    return _because(winner, f"{winner.reason}; {loser.algorithm}: {loser.balancedness:.3f}")


def _obstacle_to_hierarchy(model: ModelShape, topology: Topology) -> str | None:
    """Why groups cannot be given to nodes, or None if they can."""
    nodes = topology.nodes
    if model.num_groups % len(nodes):
        return f"{model.num_groups} groups do not divide over {len(nodes)} nodes"
    ranks_per_node = topology.num_ranks // len(nodes)
    contiguous = tuple(node for node in nodes for _ in range(ranks_per_node))
    if topology.node_of_rank != contiguous:
        return "nodes do not have equally many ranks in a row"
    experts_per_node = model.num_experts // len(nodes)
    if topology.slots_per_rank > experts_per_node:
        return f"a rank has more slots than the {experts_per_node} experts of a node"
    return None


def _plan_by(
    load: Load, start: Layout, model: ModelShape, topology: Topology, *, hierarchical: bool
) -> Plan:
    num_nodes = len(topology.nodes) if hierarchical else 1
    table = eplb(
        load,
        num_slots=topology.num_slots,
        num_groups=model.num_groups if hierarchical else 1,
        num_nodes=num_nodes,
        num_ranks=topology.num_ranks,
        hierarchical=hierarchical,
    )
    table = repair_twins(table, load=load, num_ranks=topology.num_ranks, num_nodes=num_nodes)
    table = relabel(table, start, num_nodes=num_nodes)
    table = align(table, start)
    table = _keep_layers_that_gain_nothing(table, start, load)
    algorithm = Algorithm.HIERARCHICAL if hierarchical else Algorithm.GLOBAL
    reached = balancedness(rank_loads(table, load=load, num_ranks=topology.num_ranks))
    changed = int((table != start.expert_of_slot).any(axis=1).sum())
    return Plan(
        expert_of_slot=table,
        algorithm=algorithm,
        balancedness=reached,
        reason=f"{algorithm}: {reached:.3f} by changing {changed} of {len(table)} layers",
    )


def _keep_layers_that_gain_nothing(table: ExpertTable, start: Layout, load: Load) -> ExpertTable:
    before, after = (
        balancedness_per_layer(rank_loads(placed, load=load, num_ranks=start.num_ranks))
        for placed in (start.expert_of_slot, table)
    )
    gains = after - before > LEAST_LAYER_GAIN
    return np.where(gains[:, None], table, start.expert_of_slot)


def _because(plan: Plan, reason: str) -> Plan:
    return Plan(
        expert_of_slot=plan.expert_of_slot,
        algorithm=plan.algorithm,
        balancedness=plan.balancedness,
        reason=reason,
    )

"""`plan`: the layout that a load asks for, as close as possible to the one in use."""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.balance import balancedness
from equipoise.planning.bound import upper_bounds
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import ExpertTable, Layout
from equipoise.planning.load import Load
from equipoise.planning.placing import place_globally, place_hierarchically
from equipoise.planning.policy import Algorithm
from equipoise.planning.problem import Problem
from equipoise.planning.topology import ModelShape, Topology

LEAST_LAYER_GAIN = 0.002
"""Balancedness that a layer must gain for its experts to move: below this, averages only jitter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A valid placement, what it reaches on the load it is for, and what it costs.

    `expert_of_slot` is int32 [layers, slots] over the slots of `ranks`, the ranks planned for, in
    ascending order. `algorithm` is the one that made it, never `auto`. `balancedness` is the mean
    over the layers with traffic of `balancedness_of_layer`, [layers]; `bound` is a balancedness
    that no placement with even splits exceeds. `moves` counts slots that change. `off_node_share`
    is the share of the load that is served off the node that serves most of its expert group; 0
    where there are fewer groups than nodes, so that nothing has a home.
    """

    expert_of_slot: ExpertTable
    ranks: tuple[int, ...]
    algorithm: Algorithm
    balancedness: float
    balancedness_of_layer: Load
    bound: float
    moves: int
    off_node_share: float
    reason: str


def plan(
    load: Load,
    *,
    model: ModelShape,
    topology: Topology,
    current: Layout | None = None,
    algorithm: Algorithm = Algorithm.AUTO,
    exclude_ranks: frozenset[int] = frozenset(),
) -> Plan:
    """Place experts so that ranks carry even parts of `load`, [layers, experts] in any unit.

    A layer keeps its current placement (the contiguous one, if there is none) unless it gains
    something, so a layer without load never moves and no plan is worse than what is there.
    `auto` makes both plans and keeps the more balanced; hierarchical wins ties.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    ranks = tuple(rank for rank in range(topology.num_ranks) if rank not in exclude_ranks)
    if not ranks:
        raise InvalidLayoutError("no rank is left to plan for: exclude fewer")
    problem = Problem.of(load, model=model, topology=topology, current=current, ranks=ranks)
    made = _plan(problem, algorithm)
    return replace(made, ranks=ranks)


def _plan(problem: Problem, algorithm: Algorithm) -> Plan:
    if algorithm is Algorithm.GLOBAL:
        return _plan_globally(problem)
    obstacle = problem.obstacle_to_hierarchy()
    if obstacle is not None:
        fallback = _plan_globally(problem)
        return replace(fallback, reason=f"{fallback.reason}; not hierarchical: {obstacle}")
    hierarchical = _plan_hierarchically(problem)
    if algorithm is Algorithm.HIERARCHICAL:
        return hierarchical
    other = _plan_globally(problem)
    winner, loser = (
        (hierarchical, other)
        if hierarchical.balancedness >= other.balancedness
        else (other, hierarchical)
    )
    return replace(winner, reason=f"{winner.reason}; {loser.algorithm}: {loser.balancedness:.3f}")


def _plan_globally(problem: Problem) -> Plan:
    return _adopted(problem, place_globally(problem), Algorithm.GLOBAL)


def _plan_hierarchically(problem: Problem) -> Plan:
    return _adopted(problem, place_hierarchically(problem), Algorithm.HIERARCHICAL)


def _adopted(problem: Problem, table: ExpertTable, algorithm: Algorithm) -> Plan:
    """The plan that keeps the layers to which `table` gives nothing."""
    gain = problem.balancedness_of_layer(table) - problem.balancedness_of_layer(problem.held)
    moves = (gain > LEAST_LAYER_GAIN) | ~problem.is_covered
    made = _summary(problem, np.where(moves[:, None], table, problem.held), algorithm)
    changed = int((made.expert_of_slot != problem.held).any(axis=1).sum())
    return replace(
        made,
        reason=f"{algorithm}: {made.balancedness:.3f} by changing {changed} of {len(table)} layers",
    )


def _summary(problem: Problem, table: ExpertTable, algorithm: Algorithm) -> Plan:
    """A plan with all its numbers, for all ranks of the problem and still without a reason."""
    busy = problem.load.sum(axis=1) > 0
    bounds = upper_bounds(
        problem.load,
        num_slots=problem.topology.num_slots,
        num_ranks=problem.topology.num_ranks,
    )
    return Plan(
        expert_of_slot=table,
        ranks=tuple(range(problem.topology.num_ranks)),
        algorithm=algorithm,
        balancedness=balancedness(problem.rank_loads(table)),
        balancedness_of_layer=problem.balancedness_of_layer(table),
        bound=float(bounds[busy].mean()) if busy.any() else 1.0,
        moves=int(np.count_nonzero(table != problem.held)),
        off_node_share=_off_node_share(problem, table),
        reason="",
    )


def _off_node_share(problem: Problem, table: ExpertTable) -> float:
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    total = problem.load.sum()
    if num_groups < num_nodes or num_nodes == 1 or total <= 0:
        return 0.0
    return 1.0 - float(problem.load_of_group_on_node(table).max(axis=2).sum() / total)

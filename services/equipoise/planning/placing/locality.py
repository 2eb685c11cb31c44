"""`place_locally`: a placement between hierarchical and global.

Starts from the hierarchical placement, which serves every expert on the home node of its group, and
takes the steps that relieve the busiest ranks most for the least load leaving its home: redundant
slots host experts of other nodes, and a few experts change nodes altogether.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Indices, Load, ShareTable, Slots, Weights
from equipoise.planning.placing.from_scratch import place_globally, place_hierarchically
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.refine import refine
from equipoise.planning.placing.relieve import relieve
from equipoise.planning.placing.search_state import Goal, SearchSpace

THRESHOLDS = (1.0, 1.01, 1.07)
"""Relief thresholds, in multiples of the lowest possible load of a layer's busiest rank."""

EVEN_ENOUGH = 1.001
"""A busiest rank within this multiple of the lowest possible one needs no further path."""

COST_OF_MOVE = 0.01
"""Cost of a changed slot, relative to the mean rank load leaving its home. Small: locality comes
first, and between equally local ways the one with fewer changes is taken."""


SLACK = 1.25
"""Multiple of the load that may leave its node at which a layer strays: plans use all of what is
allowed, and loads fluctuate."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Homes:
    """Which node serves each expert, and how much load may be served elsewhere."""

    of_expert: Indices
    """Home node of each expert, that of its group; int64 [layers, experts]."""
    may_leave: Weights
    """Load that may be served off its home node, in mean rank loads, [layers]."""

    @classmethod
    def of_table(cls, problem: Problem, table: ExpertTable, *, locality: float) -> Self:
        """Give each group the node that serves most of it under a placement.

        `locality` is as in `place_locally`. What has left already may stay away.
        """
        node_of_group = problem.load_of_group_on_node(table).argmax(axis=2)
        size = problem.model.num_experts // problem.model.num_groups
        allowed = np.maximum(
            locality * (1.0 - 1.0 / problem.num_nodes), problem.off_node_share_of_layer(table)
        )
        may_leave = allowed * problem.topology.num_ranks * (1.0 + 1e-9)
        return cls(of_expert=np.repeat(node_of_group, size, axis=1), may_leave=may_leave)


def strays(
    problem: Problem, table: ExpertTable, shares: ShareTable | None, *, locality: float
) -> Bools:
    """Find layers that serve more load off its group's node than a locality allows, [layers]."""
    if locality == 1.0:
        return np.zeros_like(problem.is_busy)
    if locality == 0.0:
        return ~problem.is_hierarchical(table)
    allowed = locality * (1.0 - 1.0 / problem.num_nodes)
    return problem.off_node_share_of_layer(table, shares) > SLACK * allowed


def place_locally(problem: Problem, *, locality: float) -> ExpertTable:
    """Serve most load on its home node; int32 [layers, slots].

    `locality` ranges from 0 (hierarchical) to 1 (global). In between, at most
    locality x (1 - 1 / nodes) of each layer's load is served off its home node; 1 - 1 / nodes is
    the mean of placements that ignore nodes. A hierarchical placement must be possible.
    """
    assert 0.0 <= locality <= 1.0, "a fraction"
    assert problem.obstacle_to_hierarchy() is None, "groups have home nodes"
    if locality == 1.0:
        return place_globally(problem)
    homes = place_hierarchically(problem)
    if locality == 0.0 or problem.num_nodes == 1:
        return homes
    home_of_expert = np.empty(problem.load.shape, dtype=np.int64)
    node_of_slot = np.broadcast_to(problem.node_of_rank[problem.rank_of_slot], homes.shape)
    np.put_along_axis(home_of_expert, homes.astype(np.int64), node_of_slot, axis=1)
    may_leave = locality * (1.0 - 1.0 / problem.num_nodes) * problem.topology.num_ranks
    table = homes.copy()
    for layer in np.flatnonzero(problem.is_busy).tolist():
        table[layer] = _best_within(problem, homes[layer], layer, home_of_expert[layer], may_leave)
    return _refined_within(problem, table, home_of_expert, may_leave)


def _best_within(
    problem: Problem, start: Slots, layer: int, home_of_expert: Indices, may_leave: float
) -> Slots:
    """Find the most balanced placement of one layer that keeps enough load at home."""
    load, weights = np.ascontiguousarray(problem.load_of_kinds[layer]), problem.weights
    space = SearchSpace(
        problem.first_slot,
        problem.rank_of_slot,
        problem.node_of_rank,
        home_of_expert,
        COST_OF_MOVE,
        1.0,
        0.0,
    )
    best, most = start, -np.inf
    for threshold in THRESHOLDS:
        thresholds = threshold / problem.bounds_of_kinds[:, layer]
        path = relieve(start, load, space, Goal(thresholds, weights, may_leave))
        # A kind without load in this layer has no busiest rank.
        balancedness = (weights / np.maximum(path.busiest, 1.0)).sum(axis=1)
        end = int(balancedness.argmax())
        if balancedness[end] > most:
            best, most = start.copy(), float(balancedness[end])
            for slot, expert in path.steps[:end].reshape(-1, 2).tolist():
                if slot >= 0:
                    best[slot] = expert
        if most * EVEN_ENOUGH > problem.bound_of_layer[layer]:
            break
    return best


def _refined_within(
    problem: Problem, table: ExpertTable, home_of_expert: Indices, may_leave: float
) -> ExpertTable:
    """Refine within each node, in layers where not too much load leaves its home by that."""
    refined = refine(
        table,
        load=problem.load,
        first_slot=problem.first_slot,
        block_of_rank=problem.node_of_rank,
    )
    load: Load = problem.load_of_kinds @ problem.weights
    of_replica = load / np.maximum(problem.replicas(refined), 1)
    is_off_home = (
        np.take_along_axis(home_of_expert, refined, axis=1)
        != problem.node_of_rank[problem.rank_of_slot]
    )
    off_home = (np.take_along_axis(of_replica, refined, axis=1) * is_off_home).sum(axis=1)
    return np.where((off_home <= may_leave * (1.0 + 1e-9))[:, None], refined, table)

"""Placements from scratch: the published greedy or pairs, refined, and matched to the ranks."""

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Weights
from equipoise.planning.placing.eplb import deal_groups, place
from equipoise.planning.placing.pairs import TWO_SLOTS, pair
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.refine import refine
from equipoise.planning.placing.settle import settle
from equipoise.planning.placing.spread import spread
from equipoise.planning.placing.stay import align, relabel
from equipoise.planning.placing.twins import repair_twins

SEPARATION_TOLERANCE = 2e-3
"""Relative increase of the busiest rank that placing replicas on different nodes may cost."""


def place_globally(problem: Problem, *, noise: Weights | None = None) -> ExpertTable:
    """Place any expert on any rank, close to what ranks hold; int32 [layers, slots].

    In each layer, replicas of an expert are on different nodes, so that the loss of one node does
    not take them all, unless that makes the busiest rank much busier or costs moves. For `noise`
    see `settle`.
    """
    groups = np.zeros((len(problem.load), 1), dtype=np.int64)
    starts = _starts(problem, groups=groups, num_nodes=1)
    table = _best_layers(problem, [refined_apart(problem, start) for start in starts])
    if problem.is_new:
        return table
    table = relabel(table, problem.held, first_slot=problem.first_slot)
    return settle(problem, table, problem.held, noise=noise)


def stay_near(problem: Problem, table: ExpertTable) -> ExpertTable:
    """Assign the same sets of experts to ranks so that few experts move; int32 [layers, slots].

    Only whole nodes change places: otherwise replicas of an expert could share a node again.
    """
    if problem.has_equal_nodes or problem.num_nodes == 1:
        return _near(problem, table, num_nodes=problem.num_nodes)
    return align(table, problem.held, first_slot=problem.first_slot)


def place_hierarchically(problem: Problem) -> ExpertTable:
    """Place each expert group on one node; int32 [layers, slots].

    The greedy assigns groups to nodes. If swapping groups relieves the busiest node, that
    assignment is tried too.
    """
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    assigned = deal_groups(problem.load, num_groups=num_groups, num_nodes=num_nodes)
    swapped = _relieve_nodes(problem, assigned)
    tables = [
        refine(
            start,
            load=problem.load,
            first_slot=problem.first_slot,
            block_of_rank=problem.node_of_rank,
        )
        for groups in ([assigned] if np.array_equal(swapped, assigned) else [assigned, swapped])
        for start in _starts(problem, groups=groups, num_nodes=num_nodes)
    ]
    return _near(problem, _best_layers(problem, tables), num_nodes=num_nodes)


def nodes_of_groups(problem: Problem) -> Indices:
    """Assign groups to nodes of even load, int64 [layers, groups], node by node."""
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    assigned = deal_groups(problem.load, num_groups=num_groups, num_nodes=num_nodes)
    return _relieve_nodes(problem, assigned)


def refined_apart(problem: Problem, start: ExpertTable) -> ExpertTable:
    """Refine with replicas on different nodes, or regardless of nodes where that costs balance.

    In both cases whole ranks change places at the end, which costs none.
    """
    mean = problem.load.sum(axis=1) / problem.topology.num_ranks
    of_ranks = {
        "first_slot": problem.first_slot,
        "block_of_rank": np.zeros_like(problem.node_of_rank),
    }
    table = refine(start, load=problem.load, node_of_rank=problem.node_of_rank, **of_ranks)
    busiest = problem.rank_loads(table).max(axis=1)
    doubtful = np.flatnonzero(busiest > mean * (1.0 + SEPARATION_TOLERANCE))
    if problem.num_nodes > 1 and len(doubtful):
        freely = start.copy()
        freely[doubtful] = refine(start[doubtful], load=problem.load[doubtful], **of_ranks)
        least = problem.rank_loads(freely).max(axis=1)
        at_first = problem.rank_loads(start).max(axis=1)
        too_busy = busiest > np.minimum(least * (1.0 + SEPARATION_TOLERANCE), at_first)
        table[doubtful] = np.where(too_busy[:, None], freely, table)[doubtful]
    return spread(
        table,
        num_experts=problem.model.num_experts,
        first_slot=problem.first_slot,
        node_of_rank=problem.node_of_rank,
    )


def _starts(problem: Problem, *, groups: Indices, num_nodes: int) -> list[ExpertTable]:
    """The published placement and, on ranks of two slots, pairs; without needless twins.

    Which is better shows only once both are refined: swaps often relieve the former more.
    """
    slots_of_rank = np.diff(problem.first_slot)
    tables = [place(problem.load, groups=groups, num_nodes=num_nodes, slots_of_rank=slots_of_rank)]
    if (slots_of_rank == TWO_SLOTS).all():
        tables.append(pair(tables[0], load=problem.load, num_nodes=num_nodes))
    return [
        repair_twins(
            table,
            load=problem.load,
            num_ranks=problem.topology.num_ranks,
            num_nodes=num_nodes,
            slots_of_rank=slots_of_rank,
        )
        for table in tables
    ]


def _best_layers(problem: Problem, tables: list[ExpertTable]) -> ExpertTable:
    """Take each layer from the table that balances it best, or the first of those."""
    balance = np.stack([problem.balancedness_of_layer(table) for table in tables])
    best: ExpertTable = np.stack(tables)[balance.argmax(axis=0), np.arange(len(problem.load))]
    return best


def _near(problem: Problem, table: ExpertTable, *, num_nodes: int) -> ExpertTable:
    """Permute nodes, ranks and slots so that few experts move."""
    if problem.is_new:
        return table
    first_slot = problem.first_slot
    table = relabel(table, problem.held, first_slot=first_slot, num_nodes=num_nodes)
    return align(table, problem.held, first_slot=first_slot)


def _relieve_nodes(problem: Problem, assigned: Indices) -> Indices:
    """Swap groups between nodes to relieve the busiest one; int64 [layers, groups]."""
    num_layers, num_groups = assigned.shape
    group_load = problem.load.reshape(num_layers, num_groups, -1).sum(axis=2)
    swapped = refine(
        assigned.astype(np.int32),
        load=group_load,
        first_slot=np.arange(problem.num_nodes + 1) * (num_groups // problem.num_nodes),
        block_of_rank=np.zeros(problem.num_nodes, dtype=np.int64),
    )
    return swapped.astype(np.int64)

"""A placement from scratch: the published greedy, then what makes it valid, better, and near."""

import numpy as np
import numpy.typing as npt

from equipoise.planning.eplb import deal_groups, place
from equipoise.planning.layout import ExpertTable
from equipoise.planning.problem import Problem
from equipoise.planning.refine import refine
from equipoise.planning.stay import align, relabel
from equipoise.planning.twins import repair_twins

Indices = npt.NDArray[np.int64]


def place_globally(problem: Problem) -> ExpertTable:
    """Any expert on any rank; int32 [layers, slots]."""
    groups = np.zeros((len(problem.load), 1), dtype=np.int64)
    return _place(problem, groups=groups, num_nodes=1)


def place_hierarchically(problem: Problem) -> ExpertTable:
    """Each expert group on one node; int32 [layers, slots].

    The greedy deals groups to nodes; where a swap of groups would relieve the busiest node, the
    better deal is tried too, and each layer takes the better of both.
    """
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    dealt = deal_groups(problem.load, num_groups=num_groups, num_nodes=num_nodes)
    table = _place(problem, groups=dealt, num_nodes=num_nodes)
    swapped = _relieve_nodes(problem, dealt)
    if np.array_equal(swapped, dealt):
        return table
    other = _place(problem, groups=swapped, num_nodes=num_nodes)
    better = problem.balancedness_of_layer(other) > problem.balancedness_of_layer(table)
    return np.where(better[:, None], other, table)


def _place(problem: Problem, *, groups: Indices, num_nodes: int) -> ExpertTable:
    slots_of_rank, num_ranks = np.diff(problem.first_slot), problem.topology.num_ranks
    table = place(problem.load, groups=groups, num_nodes=num_nodes, slots_of_rank=slots_of_rank)
    table = repair_twins(
        table,
        load=problem.load,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        slots_of_rank=slots_of_rank,
    )
    table = refine(
        table,
        load=problem.load,
        first_slot=problem.first_slot,
        block_of_rank=problem.node_of_rank if num_nodes > 1 else np.zeros_like(slots_of_rank),
    )
    table = relabel(table, problem.held, first_slot=problem.first_slot, num_nodes=num_nodes)
    return align(table, problem.held, first_slot=problem.first_slot)


def _relieve_nodes(problem: Problem, dealt: Indices) -> Indices:
    """Swap groups between nodes as experts between ranks; int64 [layers, groups]."""
    num_layers, num_groups = dealt.shape
    group_load = problem.load.reshape(num_layers, num_groups, -1).sum(axis=2)
    swapped = refine(
        dealt.astype(np.int32),
        load=group_load,
        first_slot=np.arange(problem.num_nodes + 1) * (num_groups // problem.num_nodes),
        block_of_rank=np.zeros(problem.num_nodes, dtype=np.int64),
    )
    return swapped.astype(np.int64)

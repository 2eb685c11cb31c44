"""`weigh`: uneven shares for a placement, or a placement made for them, if that relieves ranks.

Chooses between even and uneven shares layer by layer. Shares are judged as the whole numbers of a
layout, not as the fractions they come from.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, ShareTable
from equipoise.planning.placing.blanks import with_blanks
from equipoise.planning.placing.cover import fill
from equipoise.planning.placing.from_scratch import stay_near
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.split import split
from equipoise.planning.placing.weighted import needs_weights, place_weighted
from equipoise.planning.policy import Weighting
from equipoise.planning.shares import even_shares, whole_shares

LEAST_GAIN = 0.002
"""Balancedness that the shares of a layer must gain for `auto`: smaller gains are jitter."""


class Placed(NamedTuple):
    """Experts and shares of slots, both int32 [layers, slots]; None stands for even shares."""

    table: ExpertTable
    shares: ShareTable | None = None


def weigh(problem: Problem, table: ExpertTable, *, may_chain: bool) -> Placed:
    """Give layers shares where they help, or chains of ranks where those help more.

    Never less balanced than `table` with even splits. With `may_chain`, layers may also be placed
    from scratch for uneven shares; see `place_weighted`.
    """
    even = Placed(table)
    if problem.weighted is Weighting.OFF:
        return even
    least = LEAST_GAIN if problem.weighted is Weighting.AUTO else 0.0
    topology, num_experts = problem.topology, problem.model.num_experts
    reached = problem.balancedness_of_layer(table)
    hopeful = problem.is_busy & (reached + least < 1.0)
    if not hopeful.any():
        return even
    shares = even_shares(table, num_experts=num_experts)
    blanks = np.zeros((int(hopeful.sum()), table.shape[1] if (table == EMPTY).any() else 0))
    parts = split(
        with_blanks(table[hopeful], num_experts),
        load=np.concatenate((problem.load[hopeful], blanks), axis=1),
        rank_of_slot=problem.rank_of_slot,
    )
    shares[hopeful] = whole_shares(parts, table[hopeful], num_experts=num_experts)
    best = Placed(table, shares)
    if (
        may_chain
        and topology.has_equal_slots
        and needs_weights(
            num_slots=topology.num_slots, num_experts=num_experts, num_ranks=topology.num_ranks
        )
    ):
        chained = _chained(problem)
        of_best, of_chained = (problem.balancedness_of_layer(*one) for one in (best, chained))
        best = mixed(problem, of_chained > of_best, best, chained)
    gains = problem.balancedness_of_layer(*best) - reached
    return mixed(problem, gains > least, even, best)


def mixed(problem: Problem, takes_other: Bools, one: Placed, other: Placed) -> Placed:
    """Take the other placement in the layers of `takes_other`, bool [layers], else the one."""
    rows = takes_other[:, None]
    table = np.where(rows, other.table, one.table)
    if one.shares is None and other.shares is None:
        return Placed(table)
    even = even_shares(table, num_experts=problem.model.num_experts)
    of_one, of_other = (even if placed.shares is None else placed.shares for placed in (one, other))
    shares = np.where(rows, of_other, of_one)
    return Placed(table, None if np.array_equal(shares, even) else shares)


def _chained(problem: Problem) -> Placed:
    """Place in chains of ranks on different nodes, close to what the ranks hold."""
    topology = problem.topology
    made = place_weighted(problem.load, num_slots=topology.num_slots, num_ranks=topology.num_ranks)
    for row, load in zip(made.expert_of_slot, problem.load, strict=True):
        fill(row, load, topology)  # What serves nothing is a reserve.
    shares = whole_shares(
        made.share_of_slot, made.expert_of_slot, num_experts=problem.model.num_experts
    )
    size = topology.slots_per_rank
    slots = (_place_in_chains(problem)[:, None] * size + np.arange(size)).ravel()
    chained = Placed(made.expert_of_slot[:, slots], shares[:, slots])
    table = stay_near(problem, chained.table)
    return Placed(table, _carried(chained.table, shares[:, slots], table, size=size))


def _place_in_chains(problem: Problem) -> Indices:
    """Order ranks along the chains, [ranks], so that neighbours are on different nodes."""
    node = problem.node_of_rank
    by_node = np.argsort(node, kind="stable")
    first_of_node = np.searchsorted(node[by_node], np.arange(problem.num_nodes))
    index = np.empty_like(node)
    index[by_node] = np.arange(len(node)) - first_of_node[node[by_node]]
    place = np.empty_like(node)
    place[np.lexsort((node, index))] = np.arange(len(node))
    return place


def _carried(
    before: ExpertTable, shares: ShareTable, after: ExpertTable, *, size: int
) -> ShareTable:
    """Permute shares like the ranks and slots of a table; [layers, slots].

    Ranks of `size` slots keep their experts, so sorting by experts makes both tables equal.
    """
    shape = (len(before), -1, size)
    old, new = (
        np.argsort(table.reshape(shape), axis=2, kind="stable") for table in (before, after)
    )
    carried = np.empty_like(shares).reshape(shape)
    for layer in range(len(before)):
        old_rank, new_rank = (
            np.lexsort(np.take_along_axis(table[layer].reshape(-1, size), order[layer], 1).T)
            for table, order in ((before, old), (after, new))
        )
        carried[layer, new_rank[:, None], new[layer, new_rank]] = shares[layer].reshape(-1, size)[
            old_rank[:, None], old[layer, old_rank]
        ]
    return carried.reshape(shares.shape)

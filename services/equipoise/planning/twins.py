"""Repairs placements that hold an expert twice on one rank, which carries no extra load."""

import numpy as np
import numpy.typing as npt

from equipoise.planning.layout import ExpertTable
from equipoise.planning.load import Load

Counts = npt.NDArray[np.int64]


def repair_twins(
    table: ExpertTable, *, load: Load, num_ranks: int, num_nodes: int = 1
) -> ExpertTable:
    """Swap every needless twin away at least cost; int32 [layers, slots].

    `load` is [layers, experts]. A twin changes places with a slot of another rank such that the
    busier of the two ranks carries least, within its node (ranks [n * k, (n + 1) * k) of k to a
    node) where that is possible. An expert that every rank has already gives its twin's slot to
    the expert whose replicas carry most. Each step removes a twin and makes none, so it ends.
    """
    repaired = table.copy()
    num_layers, num_experts = load.shape
    slots_per_rank = table.shape[1] // num_ranks
    allowed = -(-slots_per_rank // num_experts)
    for layer in range(num_layers):
        by_rank = repaired[layer].reshape(num_ranks, slots_per_rank)
        counts = np.zeros((num_ranks, num_experts), dtype=np.int64)
        np.add.at(counts, (np.arange(num_ranks)[:, None], by_rank), 1)
        for rank in np.flatnonzero((counts > allowed).any(axis=1)).tolist():
            while (counts[rank] > allowed).any():
                _remove_one_twin(
                    by_rank,
                    counts,
                    rank=rank,
                    load=load[layer],
                    allowed=allowed,
                    ranks_per_node=num_ranks // num_nodes,
                )
    return repaired


def _remove_one_twin(
    by_rank: ExpertTable,
    counts: Counts,
    *,
    rank: int,
    load: Load,
    allowed: int,
    ranks_per_node: int,
) -> None:
    """Change `by_rank`, [ranks, slots_per_rank], and `counts`, [ranks, experts], in place."""
    expert = int((counts[rank] > allowed).argmax())
    own_slot = int((by_rank[rank] == expert).argmax())
    share = load / np.maximum(counts.sum(axis=0), 1)
    # A slot may come here if its expert has room here, or is itself a twin where it is.
    has_room = counts[rank] < allowed
    is_twin = np.take_along_axis(counts, by_rank, axis=1) > allowed
    lacks_expert = counts[:, expert] < allowed
    may_come = (has_room[by_rank] | is_twin) & lacks_expert[:, None] & (by_rank != expert)
    if not may_come.any():
        heir = int(np.where(has_room, share, -1.0).argmax())
        _put(by_rank, counts, rank, own_slot, heir)
        return
    node = np.arange(len(by_rank)) // ranks_per_node
    nearby = may_come & (node == node[rank])[:, None]
    candidates = nearby if nearby.any() else may_come
    carried = share[by_rank].sum(axis=1)
    brings = share[by_rank] - share[expert]
    busier = np.maximum(carried[rank] + brings, carried[:, None] - brings)
    other, slot = np.unravel_index(np.where(candidates, busier, np.inf).argmin(), by_rank.shape)
    incoming = int(by_rank[other, slot])
    _put(by_rank, counts, int(other), int(slot), expert)
    _put(by_rank, counts, rank, own_slot, incoming)


def _put(by_rank: ExpertTable, counts: Counts, rank: int, slot: int, expert: int) -> None:
    counts[rank, by_rank[rank, slot]] -= 1
    by_rank[rank, slot] = expert
    counts[rank, expert] += 1

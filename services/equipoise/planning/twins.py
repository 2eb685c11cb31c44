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
    busier of the two ranks carries least. An expert that every rank has already gives its twin's
    slot to the expert whose replicas carry most. Each step removes a twin and makes none, so it
    ends. With several nodes each expert has to live on one of them, and goes on living there.
    """
    repaired = table.copy()
    num_layers, num_experts = load.shape
    shape = (num_layers * num_nodes, num_ranks // num_nodes, table.shape[1] // num_ranks)
    allowed = -(-shape[2] * num_nodes // num_experts)
    for row, by_rank in enumerate(repaired.reshape(shape)):
        counts = np.zeros((len(by_rank), num_experts), dtype=np.int64)
        np.add.at(counts, (np.arange(len(by_rank))[:, None], by_rank), 1)
        for rank in np.flatnonzero((counts > allowed).any(axis=1)).tolist():
            while (counts[rank] > allowed).any():
                _remove_one_twin(
                    by_rank, counts, rank=rank, load=load[row // num_nodes], allowed=allowed
                )
    return repaired


def _remove_one_twin(
    by_rank: ExpertTable, counts: Counts, *, rank: int, load: Load, allowed: int
) -> None:
    """Change `by_rank`, [ranks, slots_per_rank], and `counts`, [ranks, experts], in place."""
    twin = int((counts[rank] > allowed).argmax())
    own_slot = int((by_rank[rank] == twin).argmax())
    num_replicas = counts.sum(axis=0)
    share = load / np.maximum(num_replicas, 1)
    # A slot may come here if its expert has room here, or is itself a twin where it is.
    has_room = counts[rank] < allowed
    is_twin = np.take_along_axis(counts, by_rank, axis=1) > allowed
    lacks_twin = counts[:, twin] < allowed
    may_come = (has_room[by_rank] | is_twin) & lacks_twin[:, None]
    if not may_come.any():
        heir = int(np.where(has_room & (num_replicas > 0), share, -1.0).argmax())
        _put(by_rank, counts, rank=rank, slot=own_slot, expert=heir)
        return
    carried = share[by_rank].sum(axis=1)
    brings = share[by_rank] - share[twin]
    busier = np.maximum(carried[rank] + brings, carried[:, None] - brings)
    best = np.where(may_come, busier, np.inf).argmin()
    other, slot = (int(index) for index in np.unravel_index(best, by_rank.shape))
    incoming = int(by_rank[other, slot])
    _put(by_rank, counts, rank=other, slot=slot, expert=twin)
    _put(by_rank, counts, rank=rank, slot=own_slot, expert=incoming)


def _put(by_rank: ExpertTable, counts: Counts, *, rank: int, slot: int, expert: int) -> None:
    counts[rank, by_rank[rank, slot]] -= 1
    by_rank[rank, slot] = expert
    counts[rank, expert] += 1

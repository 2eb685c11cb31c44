"""Gives every expert a slot after ranks were lost, where layers share places."""

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import count_replicas, used_places
from equipoise.planning.placing.problem import Problem


def cover_in_places(problem: Problem) -> ExpertTable | None:
    """Return the placement in use with every expert in it, int32 [layers, slots] or EMPTY.

    Each missing expert, the heaviest of its layer first, goes to the least loaded rank that has an
    empty slot and a place left. Where there is none, it takes the slot of a spare replica; or a
    rank with an empty slot gives up a spare replica of another layer. Other slots stay as they are.
    None if that fails: with hardly more places than experts, the ranks with an empty slot may have
    no place left.

    Raises:
        InvalidLayoutError: the ranks have fewer places than there are experts.
    """
    table, topology = problem.held.copy(), problem.topology
    num_places = sum(topology.places_of_rank)
    if num_places < problem.load.size:
        raise InvalidLayoutError(
            f"{topology.num_ranks} ranks with {num_places} places cannot hold "
            f"{problem.model.num_experts} experts in each of {problem.model.num_layers} layers: "
            "more workers are needed"
        )
    for layer in np.flatnonzero((problem.replicas(table) == 0).any(axis=1)).tolist():
        missing = np.flatnonzero(problem.replicas(table[layer : layer + 1])[0] == 0)
        for expert in missing[np.argsort(-problem.load[layer, missing], kind="stable")].tolist():
            if not _place(problem, table, layer, expert):
                return None
    return table


def _place(problem: Problem, table: ExpertTable, layer: int, expert: int) -> bool:
    """Place an expert in the table, if it fits."""
    first_slot, rank_of_slot = problem.first_slot, problem.rank_of_slot
    room = np.array(problem.topology.places_of_rank) - used_places(
        table, first_slot=problem.topology.first_slot
    )
    slots, carried = table[layer], problem.rank_loads(table[layer : layer + 1])[0]
    is_free = slots == EMPTY
    for allowed in (
        is_free & (room[rank_of_slot] > 0),
        _spare(problem, table[layer : layer + 1])[0],
    ):
        if allowed.any():
            slots[np.where(allowed, carried[rank_of_slot], np.inf).argmin()] = expert
            return True
    spare = _spare(problem, table)
    can_give = np.logical_or.reduceat(spare.any(axis=0), first_slot[:-1])
    for slot in np.flatnonzero(is_free & can_give[rank_of_slot])[:1].tolist():
        rank = int(rank_of_slot[slot])
        own = slice(first_slot[rank], first_slot[rank + 1])
        other, place = np.argwhere(spare[:, own])[0].tolist()
        table[other, own.start + place] = EMPTY
        slots[slot] = expert
        return True
    return False


def _spare(problem: Problem, table: ExpertTable) -> Bools:
    """Find the slots whose expert has another replica, bool [layers, slots]."""
    counts = count_replicas(table, num_experts=problem.model.num_experts)
    of_slot = np.take_along_axis(counts, np.maximum(table, 0).astype(np.int64), axis=1)
    spare: Bools = (of_slot > 1) & (table != EMPTY)
    return spare

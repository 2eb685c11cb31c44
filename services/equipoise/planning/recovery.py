"""`recover`: the initial layout of a new epoch, close to what its workers hold.

It covers all experts with as few copies as possible, because serving waits for it. The rollouts
that follow improve the balance while requests are served.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from equipoise.planning.arrays import EMPTY, Checksums, ExpertTable, Indices, Load
from equipoise.planning.layout import Layout, contiguous_layout, count_replicas, is_moved
from equipoise.planning.moves import Move, moves_into
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.placing.blanks import widened
from equipoise.planning.placing.cover import cover, fill
from equipoise.planning.placing.cover_places import cover_in_places
from equipoise.planning.placing.pooled import place_pooled
from equipoise.planning.placing.problem import Problem
from equipoise.planning.policy import Algorithm, SlotUse
from equipoise.planning.topology import ModelShape, Topology

MAX_MOVES = 2**16
"""Moves of a new epoch, as many as a pool may have experts: 0.25 s. With more, ranks read the
checkpoint, as they do when a pool starts: listing the moves would hold up other pools."""

MAX_REPAIR_WORK = 2**25
"""Work of mending what ranks hold, of `_repair_work`: about 0.3 s. Mending all layers of
DeepSeek-V3 on 320 ranks is 0.8 of that, with a single expert left in each layer."""

_STEP_WORK = 1500
_PASS_WORK = 100


def recover(
    held: Sequence[ExpertTable | None],
    *,
    load: Load,
    model: ModelShape,
    topology: Topology,
    committed: Layout | None,
    generation: int,
) -> Layout:
    """Return the layout for an epoch's ranks; the committed one itself if it can stay.

    Each expert that no rank holds, the heaviest first, takes an empty slot or that of a replica.
    Remaining empty slots take replicas of the experts with the most load per replica. Ranks that
    hold so little of use that this would exceed `MAX_REPAIR_WORK` keep the committed layout if it
    fits, and else start as if they held nothing and there were no load.

    Args:
        held: what the slots of each rank hold, int32 [layers, slots of the rank]; None if nothing.
        load: float64 [layers, experts] in any unit.
        model: the shape of the model.
        topology: the ranks of the epoch.
        committed: the committed layout, if there is one.
        generation: the generation of a new layout.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    fits = (
        committed is not None
        and committed.num_experts == model.num_experts
        and committed.num_layers == model.num_layers
        and committed.slots_of_rank == topology.slots_of_rank
    )
    if committed is None or (not fits and all(table is None for table in held)):
        placed = _from_nothing(load, model=model, topology=topology)
    else:
        otherwise = np.full((model.num_layers, topology.num_slots), EMPTY, dtype=np.int32)
        if fits:
            otherwise = _within_places(committed, topology)
        allowed = -(-max(topology.slots_of_rank) // model.num_experts)
        distinct = [None if own is None else _without_twins(own, allowed=allowed) for own in held]
        table = _side_by_side(distinct, otherwise, topology)
        if _repair_work(table, num_experts=model.num_experts, topology=topology) <= MAX_REPAIR_WORK:
            placed = _covered(Problem(load=load, model=model, topology=topology, held=table))
        elif fits and not topology.places_of_rank:
            placed = committed.expert_of_slot
        else:
            placed = _from_nothing(np.zeros_like(load), model=model, topology=topology)
    if fits and committed is not None and np.array_equal(placed, committed.expert_of_slot):
        return committed
    return Layout(
        generation=generation,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        expert_of_slot=placed,
        slots_of_rank=topology.slots_of_rank,
    )


def recovery_moves(
    held: Sequence[ExpertTable | None],
    *,
    target: Layout,
    topology: Topology,
    checksums: Checksums,
) -> Mapping[int, tuple[Move, ...]]:
    """Compute the copies from what each rank holds to `target`, nearest holders first.

    Sources are ranks of the new epoch with their present contents. `checksums` is uint8
    [layers, experts, 16]. There are none if there would be more than `MAX_MOVES`.
    """
    before = _side_by_side(held, np.full_like(target.expert_of_slot, EMPTY), topology)
    if np.count_nonzero(is_moved(before, target.expert_of_slot)) > MAX_MOVES:
        return {}
    return moves_into(before, target, topology=topology, checksums=checksums)


def _repair_work(table: ExpertTable, *, num_experts: int, topology: Topology) -> int:
    """Estimate the work of `_covered` on a table, in units of 10 ns, from above.

    An empty slot may have to pass over all that its rank holds. A missing expert without an empty
    slot looks at all slots of its layer, and where layers share places at all slots of all layers.
    """
    num_empty: Indices = (table == EMPTY).sum(axis=1)
    missing: Indices = (count_replicas(table, num_experts=num_experts) == 0).sum(axis=1)
    if topology.places_of_rank:
        return int(missing.sum()) * (_STEP_WORK + int(table.size))
    to_fill, to_cover = int(num_empty.sum()), int(np.maximum(missing - num_empty, 0).sum())
    of_empty = _STEP_WORK // 3 + _PASS_WORK * topology.slots_per_rank
    return to_fill * of_empty + to_cover * (_STEP_WORK + int(table.shape[1]))


def _covered(problem: Problem) -> ExpertTable:
    """Cover all experts; slots that are not part of a pool of places are all filled.

    Where there is no place without moving others, experts are placed anew, near what ranks hold.
    """
    if problem.topology.places_of_rank:
        covered = cover_in_places(problem)
        if covered is not None:
            return covered
        load = problem.load if problem.load.any() else np.ones_like(problem.load)
        every = np.ones(problem.model.num_layers, dtype=np.bool_)
        return place_pooled(replace(problem, load=load), free=every)
    for layer in range(problem.model.num_layers):
        fill(problem.held[layer], problem.load[layer], problem.topology)
    return cover(problem)


def _from_nothing(load: Load, *, model: ModelShape, topology: Topology) -> ExpertTable:
    """Place experts on workers that hold nothing; without load, as pools start."""
    of_layer = topology.slots_of_layer(model.num_layers)
    # Hardly more places than experts only suffice if layers have different numbers of slots.
    has_room = not topology.places_of_rank or sum(of_layer) >= model.num_experts
    is_even = topology.has_equal_slots and len(set(of_layer)) == 1
    if has_room and not load.any() and is_even:
        table = contiguous_layout(
            num_layers=model.num_layers,
            num_experts=model.num_experts,
            num_ranks=topology.num_ranks,
            slots_per_rank=of_layer[0],
        ).expert_of_slot
        return widened(table, topology, of_layer, fill=EMPTY)
    wishes = Wishes(algorithm=Algorithm.AUTO)
    if not has_room:
        wishes = Wishes(algorithm=Algorithm.AUTO, slots=SlotUse.POOLED)
        load = load if load.any() else np.ones_like(load)
    planned = plan_in_places(load, wishes, model=model, topology=topology, current=None)
    return planned.expert_of_slot


def _within_places(committed: Layout, topology: Topology) -> ExpertTable:
    """The experts of the ranks that have places for theirs; workers may return with fewer."""
    table = committed.expert_of_slot.copy()
    for rank, places in enumerate(topology.places_of_rank):
        if committed.used_places[rank] > places:
            table[:, committed.own_slots(rank)] = EMPTY
    return table


def _side_by_side(
    held: Sequence[ExpertTable | None], otherwise: ExpertTable, topology: Topology
) -> ExpertTable:
    """Join what ranks hold; a rank that holds nothing takes its part of `otherwise`."""
    table, first_slot = otherwise.copy(), topology.first_slot
    for rank, own in enumerate(held):
        if own is not None:
            table[:, first_slot[rank] : first_slot[rank + 1]] = own
    return table


def _without_twins(own: ExpertTable, *, allowed: int) -> ExpertTable:
    """Treat needless copies on a rank, left by an interrupted epoch, as empty slots."""
    order = np.argsort(own, axis=1, kind="stable")
    ordered = np.take_along_axis(own, order, axis=1)
    is_twin = np.zeros(own.shape, dtype=bool)
    again = ordered[:, allowed:] == ordered[:, : max(0, own.shape[1] - allowed)]
    again &= ordered[:, allowed:] != EMPTY
    np.put_along_axis(is_twin, order[:, allowed:], again, axis=1)
    return np.where(is_twin, np.int32(EMPTY), own)

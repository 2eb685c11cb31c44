"""`place_pooled`: layers with different numbers of slots, from one pool of places per rank.

Layers differ: some are even without replicas, others starve with the replicas that all layers get.
A replica goes where it shortens the step most, and a step waits for the busiest rank of each layer
in turn. All layers are placed with several numbers of redundant slots; of these, steepest descent
along the lower convex hulls chooses one per layer.
"""

from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import used_places
from equipoise.planning.placing.blanks import widened
from equipoise.planning.placing.locality import place_locally
from equipoise.planning.placing.pooled_by_node import place_pooled_by_node
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.rooms import into_rooms
from equipoise.planning.placing.sized import Sized, lower_hull, placed_with_sizes, with_equal_ranks
from equipoise.planning.placing.weigh import Placed, weigh
from equipoise.planning.topology import Topology

MOST_LOCAL_SIZES = 5
"""Numbers of slots per rank that layers are placed with where a locality is asked for."""


def place_pooled(problem: Problem, *, free: Bools, locality: float = 1.0) -> ExpertTable:
    """Place the layers of `free`, bool [layers], in the places that the others leave.

    No rank holds more experts over all layers than it has places, nor in one layer more than it has
    slots. The other layers stay as they are. `locality` is as in `place_locally`; one below 1 needs
    groups that can stay on nodes (`obstacle_to_pooling_by_node`). Returns int32 [layers, slots] or
    EMPTY.

    Raises:
        InvalidLayoutError: no placement was found that fits, which hardly more places than experts
            on few ranks may have.
    """
    topology = problem.topology
    kept = np.where(free[:, None], EMPTY, problem.held)
    room = np.array(topology.places_of_rank) - used_places(kept, first_slot=topology.first_slot)
    part_of = replace(
        problem,
        load=problem.load[free],
        model=replace(problem.model, num_layers=int(free.sum())),
        held=problem.held[free],
        held_shares=None,
        kinds=tuple(kind[free] for kind in problem.kinds),
    )
    num_places = int(room.sum())
    if locality < 1.0:
        tables = [place_pooled_by_node(part_of, num_places=num_places)]
        local = _place_locally(part_of, places_per_rank=int(room.min()), locality=locality)
        if local is not None:
            tables.append(local)
    else:
        tables = [_place_anywhere(part_of, num_places=num_places)]
        # Few layers on few ranks may have no exchange that makes room; this needs none.
        per_rank = int(room.min()) // len(part_of.load)
        even = with_equal_ranks(part_of, per_rank * topology.num_ranks)
        if even is not None:
            tables.append(even.table)
    fitted = [into_rooms(part_of, table, room=room, by_node=locality < 1.0) for table in tables]
    first_slot = topology.first_slot
    fitted = [one for one in fitted if (used_places(one, first_slot=first_slot) <= room).all()]
    if not fitted:
        raise InvalidLayoutError(
            f"no layout of {len(part_of.load)} layers was found in the places that are left on "
            f"{topology.num_ranks} ranks, {room.min()} to {room.max()}: give each rank more places"
        )
    placed = problem.held.copy()
    placed[free] = min(fitted, key=lambda table: _step_time(part_of, table))
    return placed


def _place_anywhere(problem: Problem, *, num_places: int) -> ExpertTable:
    """Place all layers in so many places, no matter on which ranks."""
    sizes = list(placed_with_sizes(problem, num_places=num_places))
    chosen = choose_sizes(sizes, num_places=num_places)
    return np.stack([sizes[size].placed.table[row] for row, size in enumerate(chosen)])


def _place_locally(
    problem: Problem, *, places_per_rank: int, locality: float
) -> ExpertTable | None:
    """Place all layers, each with equally many slots on all ranks; None if that is impossible.

    A locality above 0 needs slots on other nodes than that of a hot group, so nodes have as many.
    """
    topology, num_layers = problem.topology, problem.model.num_layers
    least = -(-problem.model.num_experts // topology.num_ranks)
    most = min(topology.slots_of_rank)
    if not 0.0 < locality < 1.0 or least * num_layers > places_per_rank or least > most:
        return None
    sizes = []
    for per_rank in np.unique(np.linspace(least, most, MOST_LOCAL_SIZES).astype(int)).tolist():
        narrow = replace(
            problem,
            topology=Topology(node_of_rank=topology.node_of_rank, slots_per_rank=per_rank),
            held=np.zeros((num_layers, per_rank * topology.num_ranks), dtype=np.int32),
            is_new=True,
        )
        table = place_locally(narrow, locality=locality)
        wide = widened(table, topology, narrow.topology.slots_of_rank, fill=EMPTY)
        busiest = 1.0 / narrow.balancedness_of_layer(table)
        sizes.append(Sized(num_slots=table.shape[1], placed=Placed(wide), busiest=busiest))
    chosen = choose_sizes(sizes, num_places=places_per_rank * topology.num_ranks)
    return np.stack([sizes[size].placed.table[row] for row, size in enumerate(chosen)])


def _step_time(problem: Problem, table: ExpertTable) -> float:
    """The busiest rank's load summed over layers, in multiples of the mean rank load."""
    placed = weigh(problem, table, may_chain=False)
    return float((1.0 / problem.balancedness_of_layer(*placed)).sum())


def choose_sizes(sizes: list[Sized], *, num_places: int) -> list[int]:
    """Choose a size for each layer: shortens the step most for the places that there are."""
    hulls = [
        lower_hull([(one.num_slots, one.busiest[layer]) for one in sizes])
        for layer in range(len(sizes[0].busiest))
    ]
    left = num_places - sizes[0].num_slots * len(hulls)
    reached = [0] * len(hulls)
    steps = [_step(sizes, hull, layer, 0) for layer, hull in enumerate(hulls) if len(hull) > 1]
    heapify(steps)
    while steps:
        _, layer, place = heappop(steps)
        hull = hulls[layer]
        more = sizes[hull[place + 1]].num_slots - sizes[hull[place]].num_slots
        if more > left:
            continue  # A smaller step of another layer may still fit.
        left -= more
        reached[layer] = hull[place + 1]
        if place + 2 < len(hull):
            heappush(steps, _step(sizes, hull, layer, place + 1))
    return reached


def _step(sizes: list[Sized], hull: list[int], layer: int, place: int) -> tuple[float, int, int]:
    """Return how steeply a step along a hull descends, negative, then the step itself."""
    before, after = sizes[hull[place]], sizes[hull[place + 1]]
    rise = after.busiest[layer] - before.busiest[layer]
    return float(rise) / (after.num_slots - before.num_slots), layer, place

"""`place_pooled`: layers with different numbers of slots, from one pool of places per rank.

Layers differ: some are even without replicas, others starve with the replicas that all layers get.
A replica goes where it shortens the step most, and a step waits for the busiest rank of each layer
in turn. All layers are placed with several numbers of redundant slots; of these, steepest descent
along the lower convex hulls chooses one per layer. A slot that a layer does not use holds an expert
of its own without load (a *blank*), so that a search over placements with equally many slots per
rank also finds those with unequal ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import used_places
from equipoise.planning.placing.blanks import widened, without_blanks
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.from_scratch import place_globally, refined_apart
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.rooms import into_rooms
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.placing.weigh import Placed, mixed, weigh
from equipoise.planning.topology import Topology

NUM_SIZES = 21
"""Numbers of redundant slots that each layer is placed with."""

MOST_REDUNDANT = 2.5
"""The largest of them, in multiples of the mean over layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sized:
    """All layers, placed with the same number of slots."""

    num_slots: int
    placed: Placed
    busiest: Load
    """Load of the busiest rank, in multiples of the mean rank load, [layers]."""


def place_pooled(problem: Problem, *, free: Bools) -> ExpertTable:
    """Place the layers of `free`, bool [layers], in the places that the others leave.

    No rank holds more experts over all layers than it has places, nor in one layer more than it has
    slots. The other layers stay as they are. Returns int32 [layers, slots] or EMPTY.

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
    )
    sizes = list(_placed_with_sizes(part_of, num_places=int(room.sum())))
    chosen = _choose(sizes, num_places=int(room.sum()))
    tables = [np.stack([sizes[size].placed.table[row] for row, size in enumerate(chosen)])]
    # Few layers on few ranks may have no exchange that makes room; this needs none.
    even = _with_equal_ranks(part_of, int(room.min()) // len(part_of.load) * topology.num_ranks)
    if even is not None:
        tables.append(even.table)
    fitted = [into_rooms(part_of, table, room=room) for table in tables]
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


def _step_time(problem: Problem, table: ExpertTable) -> float:
    """The busiest rank's load summed over layers, in multiples of the mean rank load."""
    placed = weigh(problem, table, may_chain=False)
    return float((1.0 / problem.balancedness_of_layer(*placed)).sum())


def _placed_with_sizes(problem: Problem, *, num_places: int) -> Iterator[_Sized]:
    """Place all layers with each number of slots, ascending; the first is one for each expert."""
    num_experts, most = problem.model.num_experts, problem.topology.num_slots
    mean = num_places // problem.model.num_layers - num_experts
    beyond = np.linspace(0.0, MOST_REDUNDANT, NUM_SIZES) * mean
    numbers = np.append(np.rint(beyond).astype(int), mean)
    for number in np.unique(np.minimum(num_experts + numbers, most)).tolist():
        placed = _with_blanks(problem, number)
        even = _with_equal_ranks(problem, number)
        if even is not None:
            of_both = (problem.balancedness_of_layer(*one) for one in (placed, even))
            placed = mixed(problem, np.greater(*reversed([*of_both])), placed, even)
        balance = problem.balancedness_of_layer(*placed)
        yield _Sized(num_slots=number, placed=placed, busiest=1.0 / balance)


def _with_blanks(problem: Problem, num_slots: int) -> Placed:
    """Place all layers in `num_slots` slots, no matter on which ranks."""
    model, topology = problem.model, problem.topology
    num_blanks = topology.num_slots - num_slots
    blanks = np.zeros((model.num_layers, num_blanks))
    wide = replace(
        problem,
        load=np.concatenate((problem.load, blanks), axis=1),
        model=replace(model, num_experts=model.num_experts + num_blanks, num_groups=1),
    )
    slots_of_rank = np.array(topology.slots_of_rank, dtype=np.int64)
    packed = repair_twins(
        _pack_layers(problem.load, num_slots, slots_of_rank),
        load=wide.load,
        num_ranks=topology.num_ranks,
        slots_of_rank=slots_of_rank,
    )
    table, shares = weigh(wide, refined_apart(wide, packed), may_chain=False)
    is_blank = table >= model.num_experts
    return Placed(
        without_blanks(table, model.num_experts),
        None if shares is None else np.where(is_blank, np.int32(0), shares),
    )


def _with_equal_ranks(problem: Problem, num_slots: int) -> Placed | None:
    """Place all layers in equally many slots on each rank, if `num_slots` allow it."""
    num_layers, topology = problem.model.num_layers, problem.topology
    per_rank, rest = divmod(num_slots, topology.num_ranks)
    is_enough = problem.model.num_experts <= num_slots <= topology.num_slots
    if rest or not is_enough or not topology.has_equal_slots:
        return None
    narrow = replace(
        problem,
        topology=Topology(node_of_rank=topology.node_of_rank, slots_per_rank=per_rank),
        held=np.zeros((num_layers, num_slots), dtype=np.int32),
        is_new=True,
    )
    table, shares = weigh(narrow, place_globally(narrow), may_chain=True)
    of_layer = narrow.topology.slots_of_rank
    return Placed(
        widened(table, topology, of_layer, fill=EMPTY),
        None if shares is None else widened(shares, topology, of_layer, fill=0),
    )


def _choose(sizes: list[_Sized], *, num_places: int) -> list[int]:
    """Choose a size for each layer: shortens the step most for the places that there are."""
    hulls = [
        _lower_hull([(one.num_slots, one.busiest[layer]) for one in sizes])
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


def _step(sizes: list[_Sized], hull: list[int], layer: int, place: int) -> tuple[float, int, int]:
    """Return how steeply a step along a hull descends, negative, then the step itself."""
    before, after = sizes[hull[place]], sizes[hull[place + 1]]
    rise = after.busiest[layer] - before.busiest[layer]
    return float(rise) / (after.num_slots - before.num_slots), layer, place


def _lower_hull(points: list[tuple[int, float]]) -> list[int]:
    """Find the points on the falling part of the lower convex hull; points ascend in x."""
    hull: list[int] = []
    for index, (x, y) in enumerate(points):
        if hull and y >= points[hull[-1]][1]:
            continue
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append(index)
    return hull


@compiled
def _pack_layers(load: Weights, num_slots: int, slots_of_rank: Indices) -> Slots:
    """Replicate, then pack on ranks regardless of how many slots each fills; [layers, slots].

    The heaviest replica goes to the least loaded rank that has a slot and does not hold the expert.
    Blanks, the experts from load.shape[1] on, fill the other slots.
    """
    num_experts = load.shape[1]
    first_slot = np.zeros(len(slots_of_rank) + 1, dtype=np.int64)
    first_slot[1:] = np.cumsum(slots_of_rank)
    table = np.empty((len(load), slots_of_rank.sum()), dtype=np.int32)
    for layer in range(len(load)):
        count = _replicate(load[layer], num_slots, len(slots_of_rank))
        share = load[layer] / count
        carried, filled = np.zeros(len(slots_of_rank)), np.zeros(len(slots_of_rank), dtype=np.int64)
        slots = table[layer]
        slots[:] = EMPTY
        for expert in np.argsort(-share, kind="mergesort"):
            for _ in range(count[expert]):
                best = _lightest(slots, expert, carried, filled, first_slot)
                slots[first_slot[best] + filled[best]] = expert
                filled[best] += 1
                carried[best] += share[expert]
        blank = num_experts
        for slot in range(len(slots)):
            if slots[slot] == EMPTY:
                slots[slot] = blank
                blank += 1
    return table


@part
def _lightest(
    slots: Slots, expert: int, carried: Weights, filled: Indices, first_slot: Indices
) -> int:
    """Find the least loaded rank with a free slot; of equal ones, that with most free slots."""
    best, open_rank = -1, -1
    for rank in range(len(carried)):
        begin = first_slot[rank]
        if begin + filled[rank] == first_slot[rank + 1]:
            continue
        open_rank = rank
        if best >= 0 and (
            carried[rank] > carried[best]
            or (carried[rank] == carried[best] and filled[rank] >= filled[best])
        ):
            continue
        if not (slots[begin : begin + filled[rank]] == expert).any():
            best = rank
    return best if best >= 0 else open_rank  # The caller separates twins.


@part
def _replicate(load: Weights, num_slots: int, num_ranks: int) -> Indices:
    """Give every redundant slot to the expert with the most load per replica, [experts]."""
    count = np.ones(len(load), dtype=np.int64)
    share = load.copy()
    for _ in range(num_slots - len(load)):
        hottest = int(share.argmax())
        count[hottest] += 1
        share[hottest] = load[hottest] / count[hottest] if count[hottest] < num_ranks else -1.0
    return count

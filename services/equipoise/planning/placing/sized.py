"""`placed_with_sizes`: all layers, placed with each of several numbers of slots.

A slot that a layer does not use holds an expert of its own without load (a *blank*), so that a
search over placements with equally many slots per rank also finds those with unequal ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import EMPTY, Indices, Load, Slots, Weights
from equipoise.planning.placing.blanks import widened, without_blanks
from equipoise.planning.placing.compiled import compiled, part
from equipoise.planning.placing.from_scratch import place_globally, refined_apart
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.placing.weigh import Placed, mixed, weigh
from equipoise.planning.topology import Topology

NUM_SIZES = 21
"""Numbers of redundant slots that each layer is placed with."""

MOST_REDUNDANT = 2.5
"""The largest of them, in multiples of the mean over layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sized:
    """All layers, placed with the same number of slots."""

    num_slots: int
    placed: Placed
    busiest: Load
    """Load of the busiest rank, in multiples of the mean rank load, [layers]."""


def placed_with_sizes(problem: Problem, *, num_places: int) -> Iterator[Sized]:
    """Place all layers with each number of slots, ascending; the first is one for each expert."""
    num_experts, most = problem.model.num_experts, problem.topology.num_slots
    mean = num_places // problem.model.num_layers - num_experts
    beyond = np.linspace(0.0, MOST_REDUNDANT, NUM_SIZES) * mean
    numbers = np.append(np.rint(beyond).astype(int), mean)
    for number in np.unique(np.minimum(num_experts + numbers, most)).tolist():
        placed = _with_blanks(problem, number)
        even = with_equal_ranks(problem, number)
        if even is not None:
            is_better = problem.balancedness_of_layer(*even) > problem.balancedness_of_layer(
                *placed
            )
            placed = mixed(problem, is_better, placed, even)
        balance = problem.balancedness_of_layer(*placed)
        yield Sized(num_slots=number, placed=placed, busiest=1.0 / balance)


def _with_blanks(problem: Problem, num_slots: int) -> Placed:
    """Place all layers in `num_slots` slots, no matter on which ranks."""
    model, topology = problem.model, problem.topology
    num_blanks = topology.num_slots - num_slots
    blanks = np.zeros((model.num_layers, num_blanks))
    wide = replace(
        problem,
        load=np.concatenate((problem.load, blanks), axis=1),
        kinds=tuple(np.concatenate((kind, blanks), axis=1) for kind in problem.kinds),
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


def with_equal_ranks(problem: Problem, num_slots: int) -> Placed | None:
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


def lower_hull(points: list[tuple[int, float]]) -> list[int]:
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

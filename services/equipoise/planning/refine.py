"""`refine`: local search after the greedy, until the busiest rank cannot be relieved.

A layer's step time is that of its busiest rank, so only that rank is worth a step: first the swap
of one of its slots with a slot of another rank that leaves the busier of the two least loaded, and
where no swap helps, one replica more of one of its experts in place of a replica that another
expert can spare. Each step lowers a rank that was the maximum and makes no new one, so no result
is worse than the input, and the search ends.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.planning.compiled import compiled
from equipoise.planning.layout import ExpertTable
from equipoise.planning.load import Load

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]
Slots = npt.NDArray[np.int32]

TOLERANCE = 5e-5
"""A rank this little above the mean of the ranks it may exchange with is as good as even."""

WORK_PER_SLOT = 400
"""Pairs of slots that are compared at most, per slot: some six times what 288 slots need."""


def refine(
    table: ExpertTable, *, load: Load, first_slot: Indices, block_of_rank: Indices
) -> ExpertTable:
    """Lower each layer's busiest rank as far as it goes; int32 [layers, slots].

    `table` is int32 [layers, slots] without needless twins, `load` [layers, experts]. `first_slot`
    is int64 [ranks + 1]: rank r owns the slots from first_slot[r] to first_slot[r + 1].
    `block_of_rank` is int64 [ranks]: experts never leave their block (a node, or all ranks). Each
    layer compares at most `WORK_PER_SLOT` pairs per slot, so time is linear in slots.
    """
    refined = np.array(table, dtype=np.int32, order="C")
    _refine_layers(
        refined,
        np.ascontiguousarray(load, dtype=np.float64),
        np.ascontiguousarray(first_slot, dtype=np.int64),
        np.ascontiguousarray(block_of_rank, dtype=np.int64),
    )
    return refined


class _Layer(NamedTuple):
    """One layer during the search; arrays, changed in place."""

    slots: Slots
    load: Weights
    num_replicas: Indices
    share: Weights
    """Load of one replica of each expert, [experts]."""
    carried: Weights
    """Load of each rank, [ranks]."""
    first_slot: Indices
    rank_of_slot: Indices
    block_of_rank: Indices


@compiled
def _refine_layers(
    table: Slots, load: Weights, first_slot: Indices, block_of_rank: Indices
) -> None:
    rank_of_slot = np.empty(table.shape[1], dtype=np.int64)
    for rank in range(len(block_of_rank)):
        rank_of_slot[first_slot[rank] : first_slot[rank + 1]] = rank
    for index in range(len(table)):
        num_replicas = np.zeros(load.shape[1], dtype=np.int64)
        for expert in table[index]:
            num_replicas[expert] += 1
        layer = _Layer(
            table[index],
            load[index],
            num_replicas,
            load[index] / np.maximum(num_replicas, 1),
            np.zeros(len(block_of_rank)),
            first_slot,
            rank_of_slot,
            block_of_rank,
        )
        _weigh_ranks(layer)
        _refine(layer)


@compiled
def _refine(layer: _Layer) -> None:
    slots, carried = layer.slots, layer.carried
    enough = _enough(layer)
    work = WORK_PER_SLOT * len(slots)
    while work > 0:
        busiest = int(carried.argmax())
        if carried[busiest] <= enough[layer.block_of_rank[busiest]]:
            return
        own, other, spent = _best_swap(layer, busiest)
        work -= spent
        if own >= 0:
            difference = layer.share[slots[own]] - layer.share[slots[other]]
            slots[own], slots[other] = slots[other], slots[own]
            carried[busiest] -= difference
            carried[layer.rank_of_slot[other]] += difference
            continue
        own, other, spent = _best_replica(layer, busiest)
        work -= spent
        if own < 0:
            return
        spared, expert = slots[other], slots[own]
        layer.num_replicas[spared] -= 1
        layer.num_replicas[expert] += 1
        layer.share[spared] = layer.load[spared] / layer.num_replicas[spared]
        layer.share[expert] = layer.load[expert] / layer.num_replicas[expert]
        slots[other] = expert
        _weigh_ranks(layer)


@compiled
def _weigh_ranks(layer: _Layer) -> None:
    layer.carried[:] = 0.0
    for slot in range(len(layer.slots)):
        layer.carried[layer.rank_of_slot[slot]] += layer.share[layer.slots[slot]]


@compiled
def _enough(layer: _Layer) -> Weights:
    """The load at which a rank of each block needs no relief, [blocks]."""
    num_blocks = layer.block_of_rank.max() + 1
    total, num_ranks = np.zeros(num_blocks), np.zeros(num_blocks)
    for rank in range(len(layer.carried)):
        total[layer.block_of_rank[rank]] += layer.carried[rank]
        num_ranks[layer.block_of_rank[rank]] += 1
    enough: Weights = total / np.maximum(num_ranks, 1) * (1.0 + TOLERANCE)
    return enough


@compiled
def _best_swap(layer: _Layer, busiest: int) -> tuple[int, int, int]:
    """The busiest rank's slot and another's to swap, or -1; and how many pairs were compared.

    A swap with a rank leaves at least the mean of both, so once a good one is found, few ranks
    are worth a look; the least loaded one gives the first.
    """
    slots, carried, first_slot = layer.slots, layer.carried, layer.first_slot
    own, other, spent = -1, -1, len(carried)
    most = carried[busiest]
    best = most * (1.0 - 1e-9)
    lightest = _lightest_beside(layer, busiest)
    for turn in range(-1, len(carried)):
        rank = lightest if turn < 0 else turn
        if (
            rank < 0
            or (most + carried[rank]) / 2 >= best
            or layer.block_of_rank[rank] != layer.block_of_rank[busiest]
        ):
            continue
        for mine in range(first_slot[busiest], first_slot[busiest + 1]):
            mine_share = layer.share[slots[mine]]
            for theirs in range(first_slot[rank], first_slot[rank + 1]):
                difference = mine_share - layer.share[slots[theirs]]
                busier = max(most - difference, carried[rank] + difference)
                if (
                    busier < best
                    and not _holds(layer, rank, slots[mine])
                    and not _holds(layer, busiest, slots[theirs])
                ):
                    best, own, other = busier, mine, theirs
        spent += (first_slot[busiest + 1] - first_slot[busiest]) * (
            first_slot[rank + 1] - first_slot[rank]
        )
    return own, other, spent


@compiled
def _lightest_beside(layer: _Layer, busiest: int) -> int:
    """The least loaded other rank of the busiest one's block, or -1."""
    lightest = -1
    for rank in range(len(layer.carried)):
        if (
            rank != busiest
            and layer.block_of_rank[rank] == layer.block_of_rank[busiest]
            and (lightest < 0 or layer.carried[rank] < layer.carried[lightest])
        ):
            lightest = rank
    return lightest


@compiled
def _best_replica(layer: _Layer, busiest: int) -> tuple[int, int, int]:
    """The busiest rank's slot to replicate and the slot to overwrite, or -1; and pairs compared.

    The slot must hold an expert with replicas to spare. Then the other replicas of that expert
    carry more, those of the first one less, and the slot's rank something else.
    """
    slots, carried, first_slot = layer.slots, layer.carried, layer.first_slot
    most = carried[busiest]
    best = most * (1.0 - 1e-9)
    own, other, spent = -1, -1, len(slots)
    first_holder, second_holder = _busiest_holders(layer)
    for slot in range(len(slots)):
        spared, rank = slots[slot], layer.rank_of_slot[slot]
        if (
            layer.num_replicas[spared] < 2
            or rank == busiest
            or layer.block_of_rank[rank] != layer.block_of_rank[busiest]
        ):
            continue
        holder = second_holder[spared] if first_holder[spared] == rank else first_holder[spared]
        rises = layer.load[spared] / (layer.num_replicas[spared] - 1) - layer.share[spared]
        if holder < 0 or carried[holder] + rises >= best:
            continue
        rises_here = rises if _holds(layer, busiest, spared) else 0.0
        spent += first_slot[busiest + 1] - first_slot[busiest]
        for mine in range(first_slot[busiest], first_slot[busiest + 1]):
            expert = slots[mine]
            share = layer.load[expert] / (layer.num_replicas[expert] + 1)
            busier = max(
                carried[holder] + rises,
                carried[rank] - layer.share[spared] + share,
                most - layer.share[expert] + share + rises_here,
            )
            if busier < best and not _holds(layer, rank, expert):
                best, own, other = busier, mine, slot
    return own, other, spent


@compiled
def _busiest_holders(layer: _Layer) -> tuple[Indices, Indices]:
    """The most loaded and the next rank that hold each expert, [experts]; -1 for none."""
    carried = layer.carried
    first = np.full(len(layer.load), -1)
    second = np.full(len(layer.load), -1)
    for slot in range(len(layer.slots)):
        expert, rank = layer.slots[slot], layer.rank_of_slot[slot]
        if first[expert] < 0 or carried[rank] > carried[first[expert]]:
            second[expert] = first[expert]
            first[expert] = rank
        elif second[expert] < 0 or carried[rank] > carried[second[expert]]:
            second[expert] = rank
    return first, second


@compiled
def _holds(layer: _Layer, rank: int, expert: int) -> bool:
    for slot in range(layer.first_slot[rank], layer.first_slot[rank + 1]):
        if layer.slots[slot] == expert:
            return True
    return False

"""`waves_in_places`: cuts a change of layers that share places so that no rank runs out of places.

Layers of which a rank holds fewer afterwards make room for those of which it holds more. Where no
order of whole layers does, replicas that the change removes anyway are given up earlier; their
layers are less balanced until it is their turn. Where even that is not enough, ranks exchange
experts of different layers along cycles, one for one.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, ShareTable
from equipoise.planning.change import LayoutChange
from equipoise.planning.layout import Layout, count_replicas, is_moved
from equipoise.planning.shares import even_shares
from equipoise.planning.wave_exchange import exchanged


def waves_in_places(
    current: Layout, target: Layout, *, layers: Sequence[int], most_moves: int
) -> list[LayoutChange]:
    """Lead from `current` to `target` by valid layouts that fill no more places of a rank.

    A rank never fills more than in the fuller one of both layouts, and stages at most `most_moves`
    experts in a wave, or one if that is less, unless the wave stages experts of one layer only.
    Experts are moved twice only where a rank has no place left for a layer after all replicas that
    leave anyway are given up.

    Args:
        current: the layout in use.
        target: the layout to reach; generations count from its own.
        layers: the layers that change, the most urgent first.
        most_moves: the most experts that a rank stages in a wave of several layers.
    """
    found, before = [], current
    tables = _Way(current, target, list(layers), most_moves)
    for generation, (experts, shares) in enumerate(tables.steps(), start=target.generation):
        after = current.with_placement(experts, generation=generation, share_of_slot=shares)
        found.append(LayoutChange.between(before, after))
        before = after
    return found


class _Way:
    """The tables on the way, and the layers that have not reached their target."""

    def __init__(self, current: Layout, target: Layout, layers: list[int], most_moves: int) -> None:
        self._first_slot, self._num_experts = current.first_slot, current.num_experts
        self._rank_of_slot = np.repeat(np.arange(current.num_ranks), current.slots_of_rank)
        self._experts, self._target = current.expert_of_slot.copy(), target.expert_of_slot
        is_even = current.share_of_slot is None and target.share_of_slot is None
        self._shares: ShareTable | None = None if is_even else current.shares().copy()
        self._target_shares = target.shares()
        self._uneven = current.uneven_layers()
        self._layers = layers
        self._most_moves = most_moves
        self._most = np.maximum(current.used_places, target.used_places)

    def steps(self) -> Iterator[tuple[ExpertTable, ShareTable | None]]:
        """Yield the tables after each wave; the last are those of the target."""
        while self._layers:
            batch = self._batch() or self._with_room()
            if not batch:
                self._exchange()
                batch = [layer for layer in self._layers if self._is_reached(layer)]
            self._layers = [layer for layer in self._layers if layer not in batch]
            self._experts[batch] = self._target[batch]
            if self._shares is not None:
                self._shares[batch] = self._target_shares[batch]
            self._uneven[batch] = False  # No replica of these is given up any more.
            shares = None if self._shares is None else self._shares.copy()
            yield self._experts.copy(), shares

    def _batch(self) -> list[int]:
        """Take the layers, the most urgent first, that need no more places or staging."""
        batch: list[int] = []
        room, staged = self._room(), np.zeros_like(self._most)
        for layer in self._layers:
            more, moves = self._growth(layer), self._moves(layer)
            fits = not batch or int((staged + moves).max()) <= self._most_moves
            if fits and (more <= room).all():
                batch.append(layer)
                room, staged = room - more, staged + moves
        return batch

    def _with_room(self) -> list[int]:
        """Make room for one layer by giving up replicas of others; none if that is impossible."""
        room = self._room()
        for layer in self._layers:
            lacking = np.maximum(self._growth(layer) - room, 0)
            spare = self._spare(lacking)
            spare[layer] = False
            if (self._by_rank(spare).sum(axis=0) >= lacking).all():
                self._give_up(self._urgent(spare, lacking))
                return [layer]
        return []

    def _spare(self, lacking: Indices) -> Bools:
        """Find replicas that leave anyway and could all be given up at once, [layers, slots].

        Of an expert that stays nowhere, a rank that lacks the fewest places keeps one.
        """
        spare = self._leaving()
        staying = np.where(spare, np.int32(EMPTY), self._experts)
        stays = count_replicas(staying, num_experts=self._num_experts) > 0
        of_slot = np.take_along_axis(stays, np.maximum(self._experts, 0).astype(np.int64), axis=1)
        layers, slots = np.nonzero(spare & ~of_slot)
        cells = layers * self._num_experts + self._experts[layers, slots]
        order = np.lexsort((lacking[self._rank_of_slot[slots]], cells))
        _, first = np.unique(cells[order], return_index=True)
        spare[layers[order[first]], slots[order[first]]] = False
        return spare

    def _urgent(self, spare: Bools, lacking: Indices) -> Bools:
        """Choose as many spare replicas of each rank as it lacks places, urgent layers first."""
        chosen = np.zeros_like(spare)
        for rank in np.flatnonzero(lacking).tolist():
            own = slice(self._first_slot[rank], self._first_slot[rank + 1])
            rows, slots = np.nonzero(spare[self._layers, own])
            layers = np.array(self._layers)[rows]
            chosen[layers[: lacking[rank]], own.start + slots[: lacking[rank]]] = True
        return chosen

    def _give_up(self, cells: Bools) -> None:
        """Empty slots, [layers, slots]; the other replicas of their experts serve their shares."""
        for layer, slot in np.argwhere(cells).tolist():
            experts = self._experts[layer]
            expert, experts[slot] = int(experts[slot]), EMPTY
            if self._shares is not None and self._uneven[layer]:
                shares = self._shares[layer]
                shares[np.flatnonzero(experts == expert)[0]] += shares[slot]
                shares[slot] = 0
        if self._shares is not None:
            is_even = cells.any(axis=1) & ~self._uneven
            self._shares[is_even] = even_shares(
                self._experts[is_even], num_experts=self._num_experts
            )

    def _exchange(self) -> None:
        """Give up all spare replicas, then exchange experts, each of which has no other."""
        self._give_up(self._spare(np.zeros_like(self._most)))
        for layer, slot, to in exchanged(
            self._experts,
            self._target,
            rank_of_slot=self._rank_of_slot,
            layers=self._layers,
            most_moves=self._most_moves,
        ):
            experts = self._experts[layer]
            experts[to], experts[slot] = experts[slot], EMPTY
            if self._shares is not None:
                shares = self._shares[layer]
                shares[to], shares[slot] = shares[slot], 0

    def _leaving(self) -> Bools:
        """Find experts that are not where they should be in the end, [layers, slots]."""
        leaving: Bools = (self._experts != self._target) & (self._experts != EMPTY)
        return leaving

    def _is_reached(self, layer: int) -> bool:
        """Whether a layer is as it should be in the end."""
        reached = np.array_equal(self._experts[layer], self._target[layer])
        if self._shares is not None:
            reached &= np.array_equal(self._shares[layer], self._target_shares[layer])
        return reached

    def _room(self) -> Indices:
        """Places that each rank has left."""
        room: Indices = self._most - self._by_rank(self._experts != EMPTY).sum(axis=0)
        return room

    def _growth(self, layer: int) -> Indices:
        """Places that each rank needs more for the target of a layer."""
        now, then = self._experts[layer] != EMPTY, self._target[layer] != EMPTY
        growth: Indices = self._by_rank(then[None])[0] - self._by_rank(now[None])[0]
        return growth

    def _moves(self, layer: int) -> Indices:
        """Experts that each rank stages for a layer."""
        moved = is_moved(self._experts[layer], self._target[layer])
        staged: Indices = self._by_rank(moved[None])[0]
        return staged

    def _by_rank(self, flags: Bools) -> Indices:
        by_rank: Indices = np.add.reduceat(flags, self._first_slot[:-1], axis=1, dtype=np.int64)
        return by_rank

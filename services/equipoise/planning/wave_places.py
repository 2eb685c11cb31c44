"""`waves_in_places`: cuts a change of layers that share places so that no rank runs out of places.

Layers of which a rank holds fewer afterwards make room for those of which it holds more. Where no
order of whole layers does, replicas that the change removes anyway are given up earlier; their
layers are less balanced until it is their turn.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, ShareTable
from equipoise.planning.change import LayoutChange
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.shares import even_shares


def waves_in_places(
    current: Layout, target: Layout, *, layers: Sequence[int], most_moves: int
) -> list[LayoutChange]:
    """Lead from `current` to `target` by valid layouts that fill no more places of a rank.

    A rank never fills more than in the fuller one of both layouts. A wave takes whole layers while
    no rank stages more than `most_moves` experts, but at least one. If places are so tight that
    layers can only change together, they share a wave, whatever it stages.

    Args:
        current: the layout in use.
        target: the layout to reach; generations count from its own.
        layers: the layers that change, the most urgent first.
        most_moves: the most experts that a rank should stage in a wave.
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
            batch = self._batch() or self._with_room() or self._joined()
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
            cells = self._replicas_to_give_up(lacking, beside=layer)
            if cells is not None:
                for other, slot in cells:
                    self._give_up(other, slot)
                return [layer]
        return []

    def _joined(self) -> list[int]:
        """Take layers in order until they fit together, which all of them do."""
        room = self._room()
        for end, layer in enumerate(self._layers, start=1):
            room = room - self._growth(layer)
            if (room >= 0).all():
                return self._layers[:end]
        return list(self._layers)

    def _replicas_to_give_up(
        self, lacking: Indices, *, beside: int
    ) -> list[tuple[int, int]] | None:
        """Find spare replicas that leave anyway, enough of each rank; None if there are too few."""
        cells: list[tuple[int, int]] = []
        for other in self._layers:
            if other == beside or not lacking.any():
                continue
            experts, target = self._experts[other], self._target[other]
            counts = np.bincount(experts[experts != EMPTY], minlength=self._num_experts)
            for rank in np.flatnonzero(lacking).tolist():
                for slot in range(self._first_slot[rank], self._first_slot[rank + 1]):
                    expert = int(experts[slot])
                    leaves = expert != EMPTY and expert != target[slot]
                    if lacking[rank] and leaves and counts[expert] > 1:
                        counts[expert] -= 1
                        lacking[rank] -= 1
                        cells.append((other, slot))
        return None if lacking.any() else cells

    def _give_up(self, layer: int, slot: int) -> None:
        """Empty a slot; the other replicas of its expert serve its share."""
        experts = self._experts[layer]
        expert, experts[slot] = int(experts[slot]), EMPTY
        if self._shares is None:
            return
        shares = self._shares[layer]
        if self._uneven[layer]:
            shares[np.flatnonzero(experts == expert)[0]] += shares[slot]
            shares[slot] = 0
        else:
            shares[:] = even_shares(experts[None], num_experts=self._num_experts)[0]

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

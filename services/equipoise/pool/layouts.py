"""`PoolLayouts`: the layouts of a pool by generation, and the checksums of its experts."""

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.planning.topology import ModelShape
from equipoise.pool.records import PoolMemory

MAX_KNOWN = 8
"""Layouts kept to read late reports; load counters keep fewer generations than that."""


class PoolLayouts:
    """What ranks run, what the store has committed, and which generation comes next."""

    def __init__(self, memory: PoolMemory) -> None:
        self._known: dict[int, Layout] = {}
        self.current: Layout | None = None
        """What all ranks run; before they reported, what the store remembers."""
        self.next_generation = memory.next_generation
        """The lowest generation that was never used."""
        self.stored_generation: int | None = None
        """Generation that the store has as committed, or None."""
        self.proposed = memory.proposed
        """What an earlier balancer was rolling out when it ended."""
        self._adopting: int | None = None
        self._checksums: ChecksumTable | None = None
        self.verified: Checksums | None = None
        """Checksums of the latest epoch that had all, uint8 [layers, experts, 16], or None."""
        if memory.committed is not None:
            self.run(memory.committed)
            self.stored_generation = memory.committed.generation
        if memory.proposed is not None:
            self.remember(memory.proposed)

    @property
    def committed(self) -> Layout | None:
        """The layout that the store has as committed."""
        return None if self.stored_generation is None else self.get(self.stored_generation)

    @property
    def is_verified(self) -> bool:
        """Whether the ranks of the epoch reported a checksum for every expert."""
        return self._checksums is not None and self._checksums.complete

    def get(self, generation: int) -> Layout | None:
        """A layout by its generation, if it is still kept."""
        return self._known.get(generation)

    def nearest(self, generation: int) -> Layout | None:
        """The layout of that generation, else the newest one, else None."""
        known = self._known.get(generation)
        return known or (self._known[max(self._known)] if self._known else None)

    def checksums(self) -> Checksums:
        """Checksums that the ranks of the epoch reported, uint8 [layers, experts, 16]."""
        assert self._checksums is not None, "an epoch has a table"
        return self._checksums.table()

    def remember(self, layout: Layout) -> None:
        """Keep a layout that a rank runs or is asked to stage, in place of any with its number."""
        known = self._known.get(layout.generation, layout)
        if layout.generation == self.stored_generation and not known.same_placement(layout):
            self.stored_generation = None  # The store has another one: this must be adopted.
        self._known[layout.generation] = layout
        self.reserve(layout.generation)
        current = self.current.generation if self.current is not None else 0
        for generation in sorted(self._known)[:-MAX_KNOWN]:
            if generation != current:
                del self._known[generation]

    def reserve(self, generation: int) -> None:
        """A rank holds something under this generation: it must not be used again."""
        self.next_generation = max(self.next_generation, generation + 1)

    def run(self, layout: Layout) -> None:
        """All ranks run this layout now."""
        self.current = layout
        self.remember(layout)

    def note_stored(self, generation: int) -> None:
        """The store has committed a generation."""
        self.stored_generation = generation

    def begin_adoption(self, generation: int) -> None:
        """A layout that no rollout led to is on its way to the store."""
        self._adopting = generation

    def end_adoption(self, *, stored_generation: int | None) -> None:
        """The store has committed that layout, or failed to if None."""
        self._adopting = None
        if stored_generation is not None:
            self.stored_generation = stored_generation

    def needs_adoption(self, generation: int) -> bool:
        """Whether a generation that all ranks run is neither committed nor about to be."""
        return generation not in {self.stored_generation, self._adopting}

    def begin_epoch(self, model: ModelShape) -> None:
        """Collect checksums from scratch; a complete table stays available as `verified`."""
        if self.is_verified:
            self.verified = self.checksums()
        shape = (model.num_layers, model.num_experts)
        if self.verified is not None and self.verified.shape[:2] != shape:
            self.verified = None
        self._checksums = ChecksumTable(num_layers=shape[0], num_experts=shape[1])

    def merge_checksums(self, layout: Layout, *, rank: int, checksums: Checksums) -> str | None:
        """Take over what a rank of the epoch holds; returns the first disagreement, or None."""
        if self._checksums is None:
            return None
        return self._checksums.merge(layout, rank=rank, checksums=checksums)


class ChecksumTable:
    """Merges the checksums of slots into one of experts, and finds ranks that disagree.

    The first rank that reports an expert's checksum is believed; moves are verified against it.
    """

    def __init__(self, *, num_layers: int, num_experts: int) -> None:
        # A checksum is kept as two numbers: every rank reports all its slots at every switch.
        self._table = np.zeros((num_layers, num_experts, CHECKSUM_BYTES // 8), dtype=np.uint64)
        self._reported_by = np.full((num_layers, num_experts), -1, dtype=np.int32)
        self._first_cell = np.arange(num_layers)[:, None] * num_experts
        self._is_complete = False

    def merge(self, layout: Layout, *, rank: int, checksums: Checksums) -> str | None:
        """Take over what a rank holds; returns the first disagreement as a message, or None.

        `checksums` is uint8 [layers, slots_per_rank, 16]. A rank that disagrees changes nothing.
        """
        first, last = layout.first_slot[rank : rank + 2]
        experts = layout.expert_of_slot[:, first:last]
        reported = np.ascontiguousarray(checksums).view(np.uint64)
        if self._is_complete and self._holds(experts, reported):
            return None  # The usual case, for every rank at every switch.
        layers = np.arange(layout.num_layers)[:, None]
        reported_by = self._reported_by[layers, experts]
        known = reported_by >= 0
        differs = known & (self._table[layers, experts] != reported).any(axis=2)
        if differs.any():
            layer, slot = (int(index) for index in np.argwhere(differs)[0])
            expert = int(experts[layer, slot])
            return (
                f"ranks {int(reported_by[layer, slot])} and {rank} hold different bytes for "
                f"expert {expert} of layer {layer}: restart the one with the damaged checkpoint"
            )
        if not known.all():
            self._table[layers, experts] = reported
            self._reported_by[layers, experts] = np.where(known, reported_by, rank)
            self._is_complete = bool((self._reported_by >= 0).all())
        return None

    @property
    def complete(self) -> bool:
        """Whether every expert of every layer has a checksum."""
        return self._is_complete

    def table(self) -> npt.NDArray[np.uint8]:
        """A copy of the table, uint8 [layers, experts, 16]."""
        return self._table.copy().view(np.uint8)

    def _holds(self, experts: ExpertTable, reported: npt.NDArray[np.uint64]) -> bool:
        """Whether these are the checksums of `experts`, [layers, slots_per_rank]."""
        known = self._table.reshape(-1, 2).take(self._first_cell + experts, axis=0)
        return np.array_equal(known, reported)

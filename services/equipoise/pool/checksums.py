"""`ChecksumTable`: the bytes that every logical expert of a pool has, as its ranks tell."""

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES


class ChecksumTable:
    """Merges the checksums of slots into one of experts, and finds ranks that disagree.

    The first rank to name an expert's checksum is believed; moves are verified against it.
    """

    def __init__(self, *, num_layers: int, num_experts: int) -> None:
        # A checksum is kept as two numbers: every rank tells of all its slots at every switch.
        self._table = np.zeros((num_layers, num_experts, CHECKSUM_BYTES // 8), dtype=np.uint64)
        self._told_by = np.full((num_layers, num_experts), -1, dtype=np.int32)
        self._first_cell = np.arange(num_layers)[:, None] * num_experts
        self._is_complete = False

    def merge(self, layout: Layout, *, rank: int, checksums: Checksums) -> str | None:
        """Take what a rank holds; returns the first disagreement in words, or None.

        `checksums` is uint8 [layers, slots_per_rank, 16]. A rank that disagrees changes nothing.
        """
        first, last = layout.first_slot[rank : rank + 2]
        experts = layout.expert_of_slot[:, first:last]
        told = np.ascontiguousarray(checksums).view(np.uint64)
        if self._is_complete and self._holds(experts, told):
            return None  # The usual case, of every rank at every switch.
        layers = np.arange(layout.num_layers)[:, None]
        told_by = self._told_by[layers, experts]
        known = told_by >= 0
        differs = known & (self._table[layers, experts] != told).any(axis=2)
        if differs.any():
            layer, slot = (int(index) for index in np.argwhere(differs)[0])
            expert = int(experts[layer, slot])
            return (
                f"ranks {int(told_by[layer, slot])} and {rank} hold different bytes for "
                f"expert {expert} of layer {layer}: restart the one with the damaged checkpoint"
            )
        if not known.all():
            self._table[layers, experts] = told
            self._told_by[layers, experts] = np.where(known, told_by, rank)
            self._is_complete = bool((self._told_by >= 0).all())
        return None

    @property
    def complete(self) -> bool:
        """Whether every expert of every layer has a checksum."""
        return self._is_complete

    def table(self) -> npt.NDArray[np.uint8]:
        """A copy of the table, uint8 [layers, experts, 16]."""
        return self._table.copy().view(np.uint8)

    def _holds(self, experts: ExpertTable, told: npt.NDArray[np.uint64]) -> bool:
        """Whether these are the checksums of `experts`, [layers, slots_per_rank]."""
        known = self._table.reshape(-1, 2).take(self._first_cell + experts, axis=0)
        return np.array_equal(known, told)

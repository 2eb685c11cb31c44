"""`HeldExperts`: the experts in this rank's slots, and the generations staged to replace them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from equipoise.planning.arrays import EMPTY, Checksums, ExpertTable
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.rank.errors import NotHeldError
from equipoise_model.experts import SlotMemory, StagedExperts, checksum

SlotIndex = tuple[int, int]
"""A MoE layer and one of this rank's slots in it, both from 0."""

_T = TypeVar("_T")
_Tables = TypeVar("_Tables")
"""What an engine looks slots up in, made from a layout."""

NO_CHECKSUM = bytes(CHECKSUM_BYTES)
"""Of an empty slot."""

_READ_ATTEMPTS = 100
_READ_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """A layout in use, and this rank's slots in it."""

    layout: Layout
    checksums: Checksums
    """Of this rank's slots, uint8 [layers, slots_per_rank, 16]; zeros for an empty one."""

    def changed(self, layout: Layout, checksums: Mapping[SlotIndex, bytes]) -> "Contents":
        """Return the contents under another layout, with new checksums for some slots."""
        updated = self.checksums.copy()
        for index, sum_ in checksums.items():
            updated[index] = np.frombuffer(sum_, dtype=np.uint8)
        updated.flags.writeable = False
        return Contents(layout=layout, checksums=updated)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedGeneration(Generic[_Tables]):
    """Everything a switch needs, built from verified bytes off the engine's thread."""

    base_generation: int
    """Generation that the switch starts from."""
    contents: Contents
    """What the slots hold after the switch."""
    tables: _Tables
    """What the engine looks slots up in after the switch."""
    experts: StagedExperts

    @property
    def generation(self) -> int:
        """The generation's number."""
        return self.contents.layout.generation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotHash:
    """What an own slot held at one moment."""

    contents: Contents
    """The layout in use, and what the slots were filled with."""
    expert: int
    """The logical expert that the slot is meant to hold."""
    found: bytes
    """Checksum of the bytes that are in the slot, 16 bytes."""


class HeldExperts(Generic[_Tables]):
    """The experts in one rank's slots, and the layout that names them.

    Only the engine's thread writes, between steps. Any thread may read, without a lock that the
    engine could block on (a seqlock): the writer makes `_version` odd before it touches a slot and
    even afterwards, and a reader discards its copy if the version was odd or has changed.
    """

    def __init__(
        self,
        slots: Sequence[SlotMemory],
        *,
        layout: Layout,
        rank: int,
        tables: Callable[[Layout], _Tables],
    ) -> None:
        """`slots` must already hold the experts of `rank` in `layout`.

        `tables` makes what the engine looks slots up in, on any thread and on its device.
        """
        self._slots = slots
        self._tables = tables
        self.rank = rank
        """The rank whose share of the layout the slots hold."""
        self._version = 0
        self._contents = Contents(layout=layout, checksums=_checksums(slots, layout, rank))

    @property
    def contents(self) -> Contents:
        """The layout in use and its checksums, read together."""
        return self._contents

    @property
    def expert_of_slot(self) -> ExpertTable:
        """Logical experts in this rank's slots, int32 [layers, slots_per_rank]."""
        layout = self._contents.layout
        return layout.expert_of_slot[:, layout.own_slots(self.rank)]

    def prepare(
        self, base: Contents, contents: Contents, payloads: Mapping[SlotIndex, Tensor]
    ) -> StagedGeneration[_Tables]:
        """Copy payloads to staging memory and build the tables of `contents`; on any thread.

        The switch empties the slots that hold nothing in `contents`.

        Raises:
            PayloadError: a payload does not have the size of this model's experts.
        """
        return StagedGeneration(
            base_generation=base.layout.generation,
            contents=contents,
            tables=self._tables(contents.layout),
            experts=StagedExperts.prepare(
                payloads,
                self._slots,
                emptied=emptied(base.layout, contents.layout, rank=self.rank),
            ),
        )

    def switch(self, staged: StagedGeneration[_Tables]) -> None:
        """Copy staged experts into their slots; on the engine's thread, between steps."""
        self.replace(staged.contents, rank=self.rank, fill=staged.experts.apply)

    def replace(self, contents: Contents, *, rank: int, fill: Callable[[], None]) -> None:
        """Hold another rank's share of another layout; `fill` writes it into the slots.

        Between two epochs no engine runs, so any thread may call this.
        """
        self._version |= 1  # If `fill` fails, nobody reads until another one succeeds.
        fill()
        self._contents, self.rank = contents, rank
        self._version += 1

    def rebase(self, contents: Contents) -> None:
        """Hold the same experts under other numbers or with other bytes; the slots stay."""
        self.replace(contents, rank=self.rank, fill=lambda: None)

    def read(self, *, layer: int, expert: int) -> Tensor:
        """Return the payload of a logical expert held here, uint8 [expert_bytes].

        Retries while a switch is in progress.

        Raises:
            NotHeldError: no slot of this rank holds it, or the slots kept changing.
        """

        def read() -> Tensor:
            slot = self._slot_of(layer, expert)
            return self._slots[layer].read(slot)

        return self._consistent(read)

    def hash_slot(self, layer: int, slot: int) -> SlotHash:
        """Hash what an own slot holds now, on any thread.

        Raises:
            NotHeldError: the slots kept changing.
        """
        payload, contents = self._consistent(
            lambda: (self._slots[layer].read(slot), self._contents)
        )
        own = contents.layout.own_slots(self.rank)
        return SlotHash(
            contents=contents,
            expert=int(contents.layout.expert_of_slot[layer, own][slot]),
            found=checksum(payload),
        )

    def hash_changed(self, since: Contents) -> Contents:
        """Hash the own slots that hold another expert than they did in `since`, on any thread.

        The result has the checksums of `since` for the other slots.

        Raises:
            NotHeldError: the slots kept changing, or changed again meanwhile.
        """
        layout, own = self._contents.layout, self._contents.layout.own_slots(self.rank)
        differs = is_moved(since.layout.expert_of_slot[:, own], layout.expert_of_slot[:, own])
        found = dict.fromkeys(emptied(since.layout, layout, rank=self.rank), NO_CHECKSUM)
        for layer, slot in np.argwhere(differs).tolist():
            hashed = self.hash_slot(layer, slot)
            if hashed.contents.layout is not layout:
                raise NotHeldError(f"rank {self.rank} has switched again")
            found[layer, slot] = hashed.found
        return since.changed(layout, found)

    def hash_all(self) -> Contents:
        """Hash all own slots, on any thread.

        Raises:
            NotHeldError: the rank switched meanwhile.
        """
        layout = self._contents.layout
        found: dict[SlotIndex, bytes] = {}
        for layer, slot in np.argwhere(self.expert_of_slot != EMPTY).tolist():
            hashed = self.hash_slot(layer, slot)
            if hashed.contents.layout is not layout:
                raise NotHeldError(f"rank {self.rank} has switched")
            found[layer, slot] = hashed.found
        return self._contents.changed(layout, found)

    def _consistent(self, read: Callable[[], _T]) -> _T:
        """Return what `read` returns while no switch is in progress."""
        for _ in range(_READ_ATTEMPTS):
            version = self._version
            if version % 2 == 0:
                result = read()
                if self._version == version:
                    return result
            time.sleep(_READ_PAUSE_S)
        raise NotHeldError(f"rank {self.rank} is switching: ask another source")

    def _slot_of(self, layer: int, expert: int) -> int:
        layout = self._contents.layout
        if 0 <= layer < layout.num_layers:
            own = layout.own_slots(self.rank)
            found = np.flatnonzero(layout.expert_of_slot[layer, own] == expert)
            if len(found):
                return int(found[0])
        raise NotHeldError(
            f"rank {self.rank} does not hold expert {expert} of layer {layer} "
            f"in generation {layout.generation}: ask another source"
        )


def emptied(before: Layout, after: Layout, *, rank: int) -> tuple[SlotIndex, ...]:
    """List a rank's own slots that hold an expert in `before` and none in `after`."""
    own = after.own_slots(rank)
    is_emptied = (before.expert_of_slot != EMPTY) & (after.expert_of_slot == EMPTY)
    return tuple((layer, slot) for layer, slot in np.argwhere(is_emptied[:, own]).tolist())


def _checksums(slots: Sequence[SlotMemory], layout: Layout, rank: int) -> Checksums:
    table = layout.expert_of_slot[:, layout.own_slots(rank)]
    sums = np.zeros((*table.shape, CHECKSUM_BYTES), dtype=np.uint8)
    for layer, slot in np.argwhere(table != EMPTY).tolist():
        found = checksum(slots[layer].read(slot))
        sums[layer, slot] = np.frombuffer(found, dtype=np.uint8)
    sums.flags.writeable = False
    return sums

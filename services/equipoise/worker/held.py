"""`HeldExperts`: what lies in this rank's slots now. `StagedGeneration`: what will next."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.worker.errors import NotHeldError
from equipoise_model.experts import PhysicalSlots, StagedExperts, checksum
from equipoise_model.placement import PlacementTables

_READ_ATTEMPTS = 100
_READ_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedGeneration:
    """Everything a switch needs, built off the engine's thread from verified bytes.

    `checksums` is uint8 [layers, slots_per_rank, 16], of all own slots after the switch.
    """

    base_generation: int
    layout: Layout
    placement: PlacementTables
    experts: StagedExperts
    checksums: Checksums

    @property
    def generation(self) -> int:
        """Number of the generation that waits."""
        return self.layout.generation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """A layout that runs, and the checksums of this rank's slots in it."""

    layout: Layout
    checksums: Checksums


class HeldExperts:
    """The experts in one rank's slots, and the layout that says which they are.

    The engine's thread alone writes, between steps. Any thread reads, without a lock that the
    engine might have to wait for: the writer makes `_version` odd before it touches a slot and
    even behind it, and a reader whose copy saw an odd or a changed version throws it away.
    """

    def __init__(self, slots: Sequence[PhysicalSlots], *, layout: Layout, rank: int) -> None:
        """Slots that are filled with `rank`'s part of a layout already."""
        self._slots = slots
        self._rank = rank
        self._version = 0
        self._contents = Contents(layout=layout, checksums=_checksums(slots))

    @property
    def contents(self) -> Contents:
        """What runs now; layout and checksums belong together."""
        return self._contents

    @property
    def expert_of_slot(self) -> ExpertTable:
        """Logical experts in own slots, int32 [layers, slots_per_rank]."""
        layout = self._contents.layout
        return layout.expert_of_slot[:, own_slots(layout, rank=self._rank)]

    def switch(self, staged: StagedGeneration) -> None:
        """Copy staged experts into their slots; on the engine's thread, between steps."""
        contents = Contents(layout=staged.layout, checksums=staged.checksums)
        self.become(contents, rank=self._rank, fill=staged.experts.apply)

    def become(self, contents: Contents, *, rank: int, fill: Callable[[], None]) -> None:
        """Hold another rank's part of another layout, which `fill` puts into the slots.

        No engine may run between two epochs.
        """
        self._version += 1
        fill()
        self._contents, self._rank = contents, rank
        self._version += 1

    def read(self, *, layer: int, expert: int) -> Tensor:
        """The payload of a logical expert held here, uint8 [expert_bytes]; waits out a switch.

        Raises:
            NotHeldError: no slot of this rank holds it, or slots changed all the time.
        """
        for _ in range(_READ_ATTEMPTS):
            version = self._version
            if version % 2 == 0:
                slot = self._slot_of(layer, expert)
                payload = self._slots[layer].read(slot)
                if self._version == version:
                    return payload
            time.sleep(_READ_PAUSE_S)
        raise NotHeldError(f"rank {self._rank} is switching: ask another source")

    def _slot_of(self, layer: int, expert: int) -> int:
        layout = self._contents.layout
        if 0 <= layer < layout.num_layers:
            own = own_slots(layout, rank=self._rank)
            found = np.flatnonzero(layout.expert_of_slot[layer, own] == expert)
            if len(found):
                return int(found[0])
        raise NotHeldError(
            f"rank {self._rank} holds no expert {expert} in layer {layer} "
            f"in generation {layout.generation}: ask another source"
        )


def own_slots(layout: Layout, *, rank: int) -> slice:
    """Columns of a layout's table that belong to a rank."""
    return slice(rank * layout.slots_per_rank, (rank + 1) * layout.slots_per_rank)


def _checksums(slots: Sequence[PhysicalSlots]) -> Checksums:
    sums = [[checksum(layer.read(slot)) for slot in range(layer.num_slots)] for layer in slots]
    flat = np.frombuffer(b"".join(one for row in sums for one in row), dtype=np.uint8)
    return flat.reshape(len(slots), -1, CHECKSUM_BYTES)

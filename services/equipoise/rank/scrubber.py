"""`Scrubber`: hashes held slots again in the background, and finds bytes that changed in memory.

A slot is filled with verified bytes once and may then serve for weeks. Like the scrubbing of disks,
this reads slot after slot at a bounded rate, off the engine's thread.
"""

import asyncio
from typing import Any

from equipoise.planning.arrays import Checksums
from equipoise.rank.errors import DamagedSlotError, NotHeldError
from equipoise.rank.held import Contents, HeldExperts, SlotHash

MIN_PAUSE_S = 0.1
"""Least time between two slots, which keeps small experts from taking the interpreter's time."""


class Scrubber:
    """Re-verifies the slots of one rank; used from the event loop only."""

    def __init__(
        self,
        held: HeldExperts[Any],
        *,
        checksums: Checksums,
        expert_bytes: int,
        bytes_per_s: float,
        min_pause_s: float = MIN_PAUSE_S,
    ) -> None:
        """`checksums` are those of all experts by the checkpoint, uint8 [layers, experts, 16]."""
        assert bytes_per_s > 0
        self._held = held
        self._checksums = checksums
        self._pause_s = max(expert_bytes / bytes_per_s, min_pause_s)
        self._turn = 0
        self._due_s: float | None = None
        self.num_verified = 0
        """Slots whose bytes were those of the checkpoint."""

    def rebase(self, checksums: Checksums) -> None:
        """Verify by other checksums from now on: all ranks have updated their weights."""
        self._checksums = checksums

    async def run(self) -> None:
        """Verify slot after slot, layer by layer and then from the start, until cancelled.

        The next call continues with the slot whose turn it was, at the time at which it is due.
        Starting over would leave the last slots unverified for as long as epochs are shorter than a
        pass through all slots, and every slot if they are shorter than one pause.

        Raises:
            DamagedSlotError: a slot no longer holds its expert's bytes, in two reads.
        """
        num_layers, num_slots = self._held.expert_of_slot.shape
        clock = asyncio.get_running_loop().time
        if self._due_s is None:
            self._due_s = clock() + self._pause_s
        while True:
            await asyncio.sleep(max(0.0, self._due_s - clock()))
            layer, slot = divmod(self._turn, num_slots)
            # A transfer from the device may fail once; memory that changed stays changed.
            if await self._wrong(layer, slot) and (wrong := await self._wrong(layer, slot)):
                raise self._damage(layer, slot, wrong)
            self._turn = (self._turn + 1) % (num_layers * num_slots)
            self._due_s = clock() + self._pause_s

    async def _wrong(self, layer: int, slot: int) -> SlotHash | None:
        """Hash a slot; returns what was found if these are not the bytes of its expert."""
        try:
            hashed = await asyncio.to_thread(self._held.hash_slot, layer, slot)
        except NotHeldError:
            return None  # It is being replaced; its turn comes again.
        if hashed.found != self._expected(layer, hashed):
            return hashed
        self.num_verified += 1
        return None

    def _expected(self, layer: int, hashed: SlotHash) -> bytes:
        expected: bytes = self._checksums[layer, hashed.expert].tobytes()
        return expected

    def _damage(self, layer: int, slot: int, hashed: SlotHash) -> DamagedSlotError:
        contents: Contents = hashed.contents.changed(
            hashed.contents.layout, {(layer, slot): hashed.found}
        )
        return DamagedSlotError(
            f"slot {slot} of layer {layer} no longer holds the bytes of expert {hashed.expert}: "
            f"their checksum is {hashed.found.hex()}, not {self._expected(layer, hashed).hex()}; "
            "memory of this machine is damaged: restart the worker, and replace the machine if it "
            "happens again",
            checksums=contents.checksums,
        )

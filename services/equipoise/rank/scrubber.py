"""`Scrubber`: hashes held slots again in the background, and finds bytes that changed in memory.

A slot is filled with verified bytes once and may then serve for weeks. Like the scrubbing of disks,
this reads slot after slot at a bounded rate, off the engine's thread. A slot whose bytes a peer
found wrong is read at once.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import numpy as np

from equipoise.planning.arrays import EMPTY, Checksums
from equipoise.rank.errors import DamagedSlotError, NotHeldError
from equipoise.rank.held import Contents, HeldExperts, SlotHash, SlotIndex

MIN_PAUSE_S = 0.1
"""Least time between two slots, so that small experts do not monopolize the interpreter; also
between two slots that peers report, since peers may be wrong."""

_log = logging.getLogger(__name__)


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
        self._min_pause_s = min_pause_s
        self._turn = 0
        self._due_s: float | None = None
        # In order, without duplicates.
        self._suspects: dict[SlotIndex, None] = {}
        self._suspects_from_s = 0.0
        self._suspected = asyncio.Event()
        self.num_verified = 0
        """Slots whose bytes were those of the checkpoint."""

    def rebase(self, checksums: Checksums) -> None:
        """Verify by other checksums from now on: all ranks have updated their weights."""
        self._checksums = checksums

    def suspect(self, layer: int, expert: int) -> None:
        """Verify the slots of an expert next: a peer got other bytes than those of the expert.

        Does nothing if no slot holds it. Regular turns still come when they are due.
        """
        table = self._held.expert_of_slot
        if layer < len(table):
            slots = np.flatnonzero(table[layer] == expert).tolist()
            self._suspects.update(dict.fromkeys((layer, slot) for slot in slots))
            self._suspected.set()

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
            if await self._until_due(self._due_s):
                await self._verify(*divmod(self._turn, num_slots))
                self._turn = (self._turn + 1) % (num_layers * num_slots)
                self._due_s = clock() + self._pause_s
            else:
                layer, slot = next(iter(self._suspects))
                was_read = await self._verify(layer, slot)
                self._suspects_from_s = clock() + self._min_pause_s
                if not was_read:
                    continue
                del self._suspects[layer, slot]
                _log.info(
                    "a peer received wrong bytes of slot %d of layer %d, but the slot is intact: "
                    "they were damaged in transit",
                    *(slot, layer),
                )

    async def _until_due(self, due_s: float) -> bool:
        """Wait for the next regular turn; returns False if a suspect is to be verified first."""
        clock = asyncio.get_running_loop().time
        while clock() < due_s:
            if self._suspects and clock() >= self._suspects_from_s:
                return False
            self._suspected.clear()
            with suppress(TimeoutError):
                wake_s = min(due_s, self._suspects_from_s) if self._suspects else due_s
                async with asyncio.timeout_at(wake_s):
                    await self._suspected.wait()
        return True

    async def _verify(self, layer: int, slot: int) -> bool:
        """Returns whether the slot could be read: it may be replaced, or its engine may sleep."""
        try:
            # A transfer from the device may fail once; memory that changed stays changed.
            if await self._wrong(layer, slot) and (wrong := await self._wrong(layer, slot)):
                raise self._damage(layer, slot, wrong)
        except NotHeldError:
            return False
        return True

    async def _wrong(self, layer: int, slot: int) -> SlotHash | None:
        """Hash a slot; returns what was found if these are not the bytes of its expert."""
        if self._held.expert_of_slot[layer, slot] == EMPTY:
            return None
        hashed = await asyncio.to_thread(self._held.hash_slot, layer, slot)
        if hashed.expert == EMPTY:
            return None  # A switch emptied it meanwhile.
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

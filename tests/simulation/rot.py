"""`BitRot`: bytes of held slots that change in memory, and how long ranks compute with them.

A rank must find them in one pass of its re-verification and name the slot, the leader must
quarantine it by name, and no rank may take the bytes over as verified.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.rank.errors import DamagedSlotError
from equipoise_model.experts import checksum
from tests.simulation.experts import SimCheckpoint
from tests.simulation.fleet import POOL, SCRUB_S
from tests.simulation.loop import Process, outside

LOOK_S = 0.5

SLACK_S = 3.0
"""Seconds beyond a pass that a rank may compute with wrong bytes."""

CONNECTED = frozenset({"bit_rot", "shift", "idle", "slow_worker", "operator", "report_gap"})
"""Kinds of faults through which a worker that stops can still tell the leader why."""


@dataclass(eq=False)
class _Rot:
    name: str
    process: Process
    layer: int
    slot: int
    data: bytes
    """What the slot holds now."""
    bound_s: float
    """Seconds for which the rank may serve with it."""
    rank: Any = None
    served_s: float = 0.0


class BitRot:
    """Damages the memory of one world's workers, and watches what they do about it."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._open: list[_Rot] = []
        self._is_looking = False
        self._all: set[bytes] = set()
        self._checksums: set[tuple[Process, int, int, str]] = set()

    def begin(self, name: str, layer: int, slot: int) -> bool:
        """Flip a bit in a slot of a worker, if it has experts; whether it had."""
        world = self._world
        worker = world.workers.get(name)
        if worker is None or not worker.process.alive or worker.rank is None:
            return False
        damaged = [(one.process, one.layer, one.slot) for one in self._open]
        if worker.core.checkpoint.damaged or (worker.process, layer, slot) in damaged:
            return False  # It is wrong already.
        if not self._is_looking:
            self._is_looking = True
            world.loop.call_later(LOOK_S, self._look, context=outside())
        contents = worker.core.slots[layer].contents
        data = bytearray(contents[slot])
        if not any(data):
            return False  # The slot is empty.
        data[7] ^= 16
        contents[slot] = bytes(data)
        self._all.add(contents[slot])
        found = checksum(torch.frombuffer(data, dtype=torch.uint8)).hex()
        self._checksums.add((worker.process, layer, slot, found))
        num_slots = len(worker.core.slots) * len(contents)
        self._open.append(
            _Rot(name, worker.process, layer, slot, bytes(data), num_slots * SCRUB_S + SLACK_S)
        )
        return True

    def explains(self, process: Process, layer: int, slot: int, data: bytes) -> bool:
        """Whether a slot holds wrong bytes only because its memory was damaged."""
        return any(
            (one.process, one.layer, one.slot, one.data) == (process, layer, slot, data)
            for one in self._open
        )

    def filled(self, checkpoint: SimCheckpoint, data: bytes) -> None:
        """A rank stages bytes, or writes them into a slot."""
        if data in self._all:
            self._world.observer.violate(
                "rot-spreads", "a rank took over bytes that were damaged in another slot's memory"
            )
        elif not checkpoint.has(data):
            self._world.observer.violate("wrong-bytes", "a rank took over bytes of no expert")

    def unsettled(self) -> str:
        """Who still computes with wrong bytes; empty if no rank does."""
        self._drop_closed()
        for rot in self._open:
            if self._world.workers[rot.name].rank is not None:
                return f"{rot.name} computes with bytes that changed in memory"
        return ""

    @property
    def idle(self) -> set[str]:
        """Workers with wrong bytes that have no rank, and so do not verify them.

        A leader that noticed first has them quarantined until they restart.
        """
        self._drop_closed()
        return {one.name for one in self._open if self._world.workers[one.name].rank is None}

    def ended(self, worker: Any, error: Exception) -> None:
        """A worker stops because of an error: of damaged memory, it must name the slot."""
        if not isinstance(error, DamagedSlotError):
            return
        world, name = self._world, worker.process.name
        about = re.match(r"slot (\d+) of layer (\d+) .* checksum is (\w+),", str(error))
        slot, layer, found = about.groups() if about else (-1, -1, "")
        # A switch may have filled the slot again between that and the worker's end.
        if (worker.process, int(layer), int(slot), found) not in self._checksums:
            world.observer.violate("rot-imagined", f"{name} stops: {error}")
        leader = world.leader()
        if leader is None or not world.kinds <= CONNECTED:
            return
        reasons = leader.seat.led.find(POOL).pool.quarantine.reasons
        if name not in reasons:
            world.observer.violate(
                "rot-unnamed", f"{name} stops because of damaged memory, and is not quarantined"
            )

    def _look(self) -> None:
        self._drop_closed()
        for rot in self._open:
            rank = self._world.workers[rot.name].rank
            if rank is None or rot.process.paused:
                continue
            if rank is not rot.rank:
                rot.rank = rank
                rot.bound_s += SCRUB_S  # An epoch begins with a pause.
            rot.served_s += LOOK_S
            if rot.served_s > rot.bound_s:
                self._world.observer.violate(
                    "rot-outlives-verification",
                    f"{rot.name} has served for {rot.served_s:g} s with bytes that changed in "
                    f"slot {rot.slot} of layer {rot.layer}",
                )
                return
        self._is_looking = bool(self._open)
        if self._is_looking:
            self._world.loop.call_later(LOOK_S, self._look, context=outside())

    def _drop_closed(self) -> None:
        """Forget damage whose process has ended, and slots that hold something else by now."""
        self._open = [one for one in self._open if self._is_open(one)]

    def _is_open(self, rot: _Rot) -> bool:
        worker = self._world.workers.get(rot.name)
        if not rot.process.alive or worker is None or worker.process is not rot.process:
            return False
        return bool(worker.core.slots[rot.layer].contents[rot.slot] == rot.data)

"""Simulated experts: a checkpoint on a disk, slots that hold bytes, and counted assignments."""

import asyncio
import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from equipoise.planning.arrays import EMPTY, Checksums
from equipoise.planning.phase import Phase
from equipoise.planning.shares import WHOLE
from equipoise.planning.topology import ModelShape
from equipoise_model.checkpoint import CheckpointError
from equipoise_model.dispatch import SlotLoad
from equipoise_model.experts import checksum

CPU = torch.device("cpu")
EXPERT_BYTES = 16
_LAYERS = np.arange(64)[:, None]


@cache
def expert_bytes(layer: int, expert: int) -> bytes:
    """The true bytes of an expert; zeros for none."""
    if expert == EMPTY:
        return bytes(EXPERT_BYTES)
    return hashlib.blake2b(f"{layer}/{expert}".encode(), digest_size=EXPERT_BYTES).digest()


@lru_cache(maxsize=1024)
def _tensor(data: bytes) -> torch.Tensor:
    """Bytes as the product has them. It does not change what it reads."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


checksum_of = lru_cache(maxsize=1024)(checksum)
"""The product's checksum, computed once for each tensor. Nothing writes to one (`_tensor`)."""


class SimCheckpoint:
    """A checkpoint on a disk that may be damaged, slow, or hang."""

    fingerprint = "f" * 32
    verifies = True
    """Every read is compared with the checkpoint's manifest, as `Checkpoint` does."""

    def __init__(self, shape: ModelShape) -> None:
        self.damaged: set[tuple[int, int]] = set()
        self.hangs_until_s = 0.0
        self.read_s = 0.0
        """How long a read takes. No fault of a schedule changes it."""
        self.is_gone = False
        self.on_effect: Callable[[str], None] = lambda _kind: None
        self._true = {
            (layer, expert): expert_bytes(layer, expert)
            for layer in range(shape.num_layers)
            for expert in range(shape.num_experts)
        }
        self._experts = frozenset(self._true.values())
        sums = b"".join(checksum_of(_tensor(data)) for data in self._true.values())
        self._checksums = np.frombuffer(sums, dtype=np.uint8).reshape(
            shape.num_layers, shape.num_experts, -1
        )

    def has(self, data: bytes) -> bool:
        """Whether these are the bytes of an expert, by the manifest."""
        return data in self._experts

    @property
    def payload_checksums(self) -> Checksums:
        """Of all experts by the manifest, [layers, experts, 16]."""
        return self._checksums

    def read_expert(self, layer: int, expert: int) -> Any:
        """The payload; a coroutine that returns it, if the disk hangs or is slow."""
        if self.is_gone:
            self.on_effect("disk_gone")
            raise OSError("the disk is gone")
        if (layer, expert) in self.damaged:
            self.on_effect("disk_damaged")
        if self.verifies and (layer, expert) in self.damaged:
            raise CheckpointError(f"expert {expert} of layer {layer} is damaged")
        loop = asyncio.get_running_loop()
        payload = self._payload(layer, expert)
        if loop.time() < self.hangs_until_s:
            self.on_effect("disk_hangs")
            return _later(self.hangs_until_s - loop.time(), payload)
        return _later(self.read_s, payload) if self.read_s else payload

    def _payload(self, layer: int, expert: int) -> torch.Tensor:
        data = bytearray(self._true[layer, expert])
        if (layer, expert) in self.damaged:
            data[3] ^= 1
        return _tensor(bytes(data))


async def _later(after_s: float, payload: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(after_s)
    return payload


class SimSlots:
    """One layer's slots."""

    device = CPU

    def __init__(self, num_slots: int, *, on_fill: Callable[[bytes], None]) -> None:
        self.num_slots = num_slots
        self._on_fill = on_fill
        self.contents: list[bytes] = [bytes(EXPERT_BYTES)] * num_slots

    def read(self, slot: int) -> torch.Tensor:
        return _tensor(self.contents[slot])

    def empty(self, slot: int) -> None:
        self.contents[slot] = bytes(EXPERT_BYTES)

    def write(self, slot: int, payload: torch.Tensor) -> None:
        self.contents[slot] = payload.numpy().tobytes()
        self._on_fill(self.contents[slot])

    def stage(self, payloads):
        staged = {slot: payload.numpy().tobytes() for slot, payload in payloads.items()}
        for data in staged.values():
            self._on_fill(data)

        def settle(_arrive: Any) -> None:
            for slot, data in staged.items():
                self.contents[slot] = data

        return settle


class SimPlacement:
    """In place of the tables that the model dispatches by."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def to(self, _device: Any) -> "SimPlacement":
        return self


class SimExperts:
    """Counts assignments as the dispatch would."""

    waited_s = 0.0
    spread = None

    def __init__(self, joined: Any, core: Any, *, phase: Phase) -> None:
        self._core, self._rank = core, joined.join_epoch.rank
        self._previous: SlotLoad | None = None
        self._start(joined.join_epoch.layout)

    def _start(self, layout: Any) -> None:
        self.layout = layout
        own = layout.own_slots(self._rank)
        self._share_LS = layout.shares()[:, own] / WHOLE
        self._experts_LS = layout.expert_of_slot[:, own]
        self._load_LS = np.zeros(self._share_LS.shape)
        self._traffic_LE: Any = None

    def loads(self) -> tuple[SlotLoad, ...]:
        load = self._load_LS.round().astype(np.int64)
        current = SlotLoad(generation=self.layout.generation, slot_load_LS=load)
        return (current,) if self._previous is None else (current, self._previous)

    def agree(self, _tokens: Any) -> None:
        pass

    def switch(self, placement: SimPlacement) -> None:
        self._previous = self.loads()[0]
        self._start(placement.layout)

    def serve(self) -> None:
        """Run one step's tokens of all ranks."""
        load_LE = self._core.world.traffic()
        if load_LE is not self._traffic_LE:
            self._traffic_LE = load_LE
            load_LS = load_LE[_LAYERS[: len(load_LE)], self._experts_LS]
            self._step_LS = load_LS * self._share_LS
        self._load_LS = self._load_LS + self._step_LS

    def close(self) -> None:
        pass

"""`PhysicalSlots`: a rank's expert slots in one layer; `StagedExperts`: experts awaiting a switch.

Shared by both data planes: `plain.experts` and `fp8.experts` implement `PhysicalSlots`. The layout
decides which logical expert a slot holds; this module does not depend on it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from equipoise_model.device import Arrive, beside

CHECKSUM_BYTES = 16


class PayloadError(ValueError):
    """An expert's payload does not fit the model; the message gives the sizes."""


Settle = Callable[[Arrive], None]
"""Puts staged experts into their slots, once the copies are complete."""


class SlotMemory(Protocol):
    """The memory of one rank's expert slots in one layer, in any engine."""

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""

    @property
    def device(self) -> torch.device:
        """The device that holds the slots."""

    def read(self, slot: int) -> Tensor:
        """Read the payload of one slot into a new uint8 tensor [expert_bytes] on the host."""

    def stage(self, payloads: Mapping[int, Tensor]) -> Settle:
        """Prepare payloads by slot for a switch, on any thread, or raise PayloadError."""

    def empty(self, slot: int) -> None:
        """Free the place of a slot; on the engine's thread. Only where layers share places."""


class PhysicalSlots(SlotMemory, Protocol):
    """One rank's expert slots in one layer, in either data plane."""

    def __call__(self, x_ND: Tensor, rows_per_slot: Sequence[int]) -> Tensor:
        """Run rows in slot order through their slots' networks, [N, D]; N may be 0."""

    def write(self, slot: int, payload: Tensor) -> None:
        """Overwrite one slot with a payload. Raises PayloadError if it does not fit."""

    def own_places(self, num_slots: int, *, num_places: int, num_spare: int) -> None:
        """Allocate places for the experts of several layers, and have `num_slots` empty slots."""

    def share_places(self, owner: Self) -> None:
        """Have as many empty slots as `owner`, in its places."""


NO_PLACE = -1
"""Place of an empty slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedExperts:
    """Experts that wait for a switch, already on the device and in compute format.

    `prepare` does the slow part on any thread, on a separate stream if there is a GPU. `apply`
    makes a few copies per changed layer and is the only part that serving waits for.
    """

    empty: tuple[Callable[[], None], ...]
    """Frees the place of one slot, for the experts of other slots."""
    settle: tuple[Settle, ...]
    """Puts one layer's experts into their slots."""
    arrive: Arrive
    """Makes the computation wait for the copies."""

    @classmethod
    @torch.no_grad()
    def prepare(
        cls,
        payloads: Mapping[tuple[int, int], Tensor],
        layers: Sequence[SlotMemory],
        *,
        emptied: Sequence[tuple[int, int]] = (),
    ) -> Self:
        """Decode payloads by (layer, slot of this rank) for the rank's MoE layers.

        Slots that are `emptied` hold nothing after the switch.

        Raises:
            PayloadError: a payload does not have this model's expert size.
        """
        of_layer: dict[int, dict[int, Tensor]] = {}
        for layer, slot in sorted(payloads):
            of_layer.setdefault(layer, {})[slot] = payloads[layer, slot]
        with beside(layers[0].device) as arrive:
            staged = tuple(layers[layer].stage(of_slot) for layer, of_slot in of_layer.items())
        empty = tuple(partial(layers[layer].empty, slot) for layer, slot in emptied)
        return cls(empty=empty, settle=staged, arrive=arrive)

    @torch.no_grad()
    def apply(self) -> None:
        """Put them into their slots: call once, between steps, on the engine's thread."""
        for empty in self.empty:
            empty()
        for settle in self.settle:
            settle(self.arrive)


def check_payload(payload: Tensor, num_bytes: int) -> None:
    """Raise PayloadError unless a payload has `num_bytes` bytes."""
    if payload.dtype != torch.uint8 or payload.shape != (num_bytes,):
        raise PayloadError(
            f"an expert's payload is {num_bytes} bytes, not {payload.dtype} of shape "
            f"{tuple(payload.shape)}: it comes from another model or was cut short"
        )


def payload_from_bytes(data: bytearray) -> Tensor:
    """View received bytes as a payload: a uint8 tensor that shares their memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def checksum(payload: Tensor) -> bytes:
    """BLAKE2b-128 of a payload, 16 bytes; all holders of an expert must agree on it."""
    return hashlib.blake2b(payload.numpy().data, digest_size=CHECKSUM_BYTES).digest()

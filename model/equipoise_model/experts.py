"""`PhysicalSlots`: a rank's expert slots in one layer; `StagedExperts`: experts awaiting a switch.

Shared by both data planes: `plain.experts` and `fp8.experts` implement `PhysicalSlots`. The layout
decides which logical expert a slot holds; nothing here knows it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from equipoise_model.device import Arrive, beside

CHECKSUM_BYTES = 16


class PayloadError(ValueError):
    """An expert's payload that does not fit the model; the message names the sizes."""


Settle = Callable[[Arrive], None]
"""Has staged experts in their slots, once they have arrived."""


class PhysicalSlots(Protocol):
    """One rank's physical slots of one layer, in whichever form they compute."""

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    def __call__(self, x_ND: Tensor, rows_per_slot: Sequence[int]) -> Tensor:
        """Rows in slot order through their slots' networks, [N, D]; N may be 0."""

    def read(self, slot: int) -> Tensor:
        """The payload of one slot, a new uint8 tensor [expert_bytes] on the host."""

    def write(self, slot: int, payload: Tensor) -> None:
        """Overwrite one slot from a payload, or raise PayloadError."""

    def stage(self, payloads: Mapping[int, Tensor]) -> Settle:
        """Have payloads by slot ready for a switch, or raise PayloadError; on any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedExperts:
    """Experts that wait for a switch, already on the device and in the form that computes.

    `prepare` does the slow part on any thread, and where there is a device beside the host on a
    stream of its own; `apply` is a few copies per changed layer, and the only part that serving
    waits for.
    """

    settle: tuple[Settle, ...]
    arrive: Arrive

    @classmethod
    @torch.no_grad()
    def prepare(
        cls, payloads: Mapping[tuple[int, int], Tensor], layers: Sequence[PhysicalSlots]
    ) -> Self:
        """Decode payloads by (layer, slot of this rank) for the rank's MoE layers.

        Raises:
            PayloadError: a payload is not of this model's expert size.
        """
        of_layer: dict[int, dict[int, Tensor]] = {}
        for layer, slot in sorted(payloads):
            of_layer.setdefault(layer, {})[slot] = payloads[layer, slot]
        with beside(layers[0].device) as arrive:
            staged = tuple(layers[layer].stage(of_slot) for layer, of_slot in of_layer.items())
        return cls(settle=staged, arrive=arrive)

    @torch.no_grad()
    def apply(self) -> None:
        """Have them in their slots: once, between steps, on the engine's thread."""
        for settle in self.settle:
            settle(self.arrive)


def check_payload(payload: Tensor, num_bytes: int) -> None:
    """Raise PayloadError unless a payload has so many bytes."""
    if payload.dtype != torch.uint8 or payload.shape != (num_bytes,):
        raise PayloadError(
            f"an expert's payload is {num_bytes} bytes, not {payload.dtype} of shape "
            f"{tuple(payload.shape)}: it comes from another model or was cut short"
        )


def payload_from_bytes(data: bytearray) -> Tensor:
    """View received bytes as a payload: a uint8 tensor that shares their memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def checksum(payload: Tensor) -> bytes:
    """BLAKE2b-128 of a payload: 16 bytes that every holder of an expert must agree on."""
    return hashlib.blake2b(payload.numpy().data, digest_size=CHECKSUM_BYTES).digest()

"""`ExpertSlots`: one rank's physical slots of one layer, and `StagedExperts`: what a switch copies.

Owns the payload of an expert: gate, up and down, each row-major, BF16 little-endian, as the
checkpoint stores them. Which logical expert a slot holds is the layout's business, not known here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise_kernels.grouped_ffn import grouped_ffn
from equipoise_model.device import Arrive, beside

CHECKSUM_BYTES = 16


class PayloadError(ValueError):
    """An expert's payload that does not fit the model; the message names the sizes."""


class ExpertSlots(nn.Module):
    """Weights of `num_slots` experts, in compute dtype: float32 unless the module is converted.

    `gate_up` is [slots, 2 I, D], the gate's rows before up's; `down` is [slots, D, I].
    """

    def __init__(
        self, dim: int, hidden_dim: int, *, num_slots: int, row_block: int | None = None
    ) -> None:
        super().__init__()
        self.row_block = row_block
        self.gate_up = nn.Parameter(torch.empty(num_slots, 2 * hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_slots, dim, hidden_dim))

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""
        return int(self.gate_up.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self.gate_up.device

    def forward(self, x_ND: Tensor, rows_per_slot: Sequence[int]) -> Tensor:
        """Rows in slot order through their slots' networks, [N, D]; N may be 0."""
        return grouped_ffn(x_ND, self.gate_up, self.down, rows_per_slot, row_block=self.row_block)

    @torch.no_grad()
    def read(self, slot: int) -> Tensor:
        """The payload of one slot, a new uint8 tensor [expert_bytes].

        Exact if the slot was written from a payload; trained float32 weights are rounded to BF16.
        """
        flat = torch.cat([self.gate_up[slot].flatten(), self.down[slot].flatten()])
        return flat.to(dtype=torch.bfloat16, device="cpu").view(torch.uint8)

    @torch.no_grad()
    def write(self, slot: int, payload: Tensor) -> None:
        """Overwrite one slot from a payload.

        Raises:
            PayloadError: the payload is not of this model's expert size.
        """
        gate_up_HD, down_DI = self.decode(payload)
        self.gate_up[slot].copy_(gate_up_HD)
        self.down[slot].copy_(down_DI)

    def decode(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """A payload as `gate_up` and `down` of one slot, BF16 views of it where alignment allows.

        Raises:
            PayloadError: the payload is not of this model's expert size.
        """
        _, hidden_rows, dim = self.gate_up.shape
        gate_up_size, down_size = hidden_rows * dim, hidden_rows // 2 * dim
        expected = 2 * (gate_up_size + down_size)
        if payload.dtype != torch.uint8 or payload.shape != (expected,):
            raise PayloadError(
                f"an expert's payload is {expected} bytes, not {payload.dtype} of shape "
                f"{tuple(payload.shape)}: it comes from another model or was cut short"
            )
        gate_up, down = payload.contiguous().view(torch.bfloat16).split([gate_up_size, down_size])
        return gate_up.view(hidden_rows, dim), down.view(dim, hidden_rows // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedLayer:
    layer: int
    slots: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedExperts:
    """Experts that wait for a switch, already in the compute dtype and one tensor per layer.

    `prepare` does the slow part on any thread, and where there is a device beside the host on a
    stream of its own; `apply` is two copies per changed layer, and the only part that serving waits
    for.
    """

    layers: tuple[_StagedLayer, ...]
    arrive: Arrive

    @classmethod
    @torch.no_grad()
    def prepare(
        cls, payloads: Mapping[tuple[int, int], Tensor], layers: Sequence[ExpertSlots]
    ) -> Self:
        """Decode payloads by (layer, slot of this rank) for the rank's MoE layers.

        Raises:
            PayloadError: a payload is not of this model's expert size.
        """
        staged = []
        with beside(layers[0].device) as arrive:
            for layer in sorted({layer for layer, _ in payloads}):
                experts = layers[layer]
                slots = sorted(slot for of_layer, slot in payloads if of_layer == layer)
                decoded = [experts.decode(payloads[layer, slot]) for slot in slots]
                gate_up = torch.stack([gate_up for gate_up, _ in decoded])
                down = torch.stack([down for _, down in decoded])
                staged.append(
                    _StagedLayer(
                        layer=layer,
                        slots=torch.tensor(slots, device=experts.device),
                        gate_up=gate_up.to(experts.gate_up),
                        down=down.to(experts.down),
                    )
                )
        return cls(layers=tuple(staged), arrive=arrive)

    @torch.no_grad()
    def apply(self, layers: Sequence[ExpertSlots]) -> None:
        """Copy into the slots: between steps, on the engine's thread."""
        for staged in self.layers:
            self.arrive(staged.slots, staged.gate_up, staged.down)
            layers[staged.layer].gate_up.index_copy_(0, staged.slots, staged.gate_up)
            layers[staged.layer].down.index_copy_(0, staged.slots, staged.down)


def payload_from_bytes(data: bytes | bytearray | memoryview) -> Tensor:
    """Received bytes as a payload, a uint8 tensor that owns a copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def checksum(payload: Tensor) -> bytes:
    """BLAKE2b-128 of a payload: 16 bytes that every holder of an expert must agree on."""
    return hashlib.blake2b(payload.numpy().data, digest_size=CHECKSUM_BYTES).digest()

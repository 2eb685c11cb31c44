"""`ExpertSlots`: one rank's expert slots in one layer, computed by torch.

Owns the BF16 payload of an expert: gate, up and down, each row-major and little-endian, as a BF16
checkpoint stores them.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from equipoise_kernels.plain.grouped_ffn import grouped_ffn
from equipoise_model.device import Arrive
from equipoise_model.experts import NO_PLACE, Settle, check_payload


class ExpertSlots(nn.Module):
    """Weights of `num_slots` experts, in torch's default dtype unless one is given.

    `gate_up` is [places, 2 I, D], the gate's rows before up's; `down` is [places, D, I]. A slot has
    the place of its number, unless layers share their places.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        num_slots: int,
        row_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.row_block = row_block
        self.gate_up = nn.Parameter(torch.empty(num_slots, 2 * hidden_dim, dim, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_slots, dim, hidden_dim, dtype=dtype))
        self._place_of_slot = list(range(num_slots))
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""
        return len(self._place_of_slot)

    @property
    def device(self) -> torch.device:
        """The device that holds the slots."""
        return self.gate_up.device

    def forward(self, x_ND: Tensor, rows_per_slot: Sequence[int]) -> Tensor:
        """Run rows in slot order through their slots' networks, [N, D]; N may be 0."""
        return grouped_ffn(
            x_ND,
            self.gate_up,
            self.down,
            rows_per_slot,
            row_block=self.row_block,
            place_of_slot=self._place_of_slot,
        )

    def own_places(self, num_slots: int, *, num_places: int, num_spare: int) -> None:
        """See `PhysicalSlots`; experts are staged elsewhere, so there are no spare places."""
        del num_spare
        self.gate_up = nn.Parameter(self.gate_up.new_empty(num_places, *self.gate_up.shape[1:]))
        self.down = nn.Parameter(self.down.new_empty(num_places, *self.down.shape[1:]))
        self._place_of_slot = [NO_PLACE] * num_slots
        self._free = list(range(num_places))

    def share_places(self, owner: Self) -> None:
        """See `PhysicalSlots`."""
        self.gate_up, self.down, self._free = owner.gate_up, owner.down, owner._free
        self._place_of_slot = [NO_PLACE] * owner.num_slots

    def empty(self, slot: int) -> None:
        """Free the place of a slot."""
        self._free.append(self._place_of_slot[slot])
        self._place_of_slot[slot] = NO_PLACE

    def _place(self, slot: int) -> int:
        """The place of a slot; an empty slot takes a free one."""
        if self._place_of_slot[slot] == NO_PLACE:
            self._place_of_slot[slot] = self._free.pop()
        return self._place_of_slot[slot]

    @torch.no_grad()
    def read(self, slot: int) -> Tensor:
        """Read the payload of one slot into a new uint8 tensor [expert_bytes].

        Exact if the slot was written from a payload; trained float32 weights are rounded to BF16.
        """
        place = self._place_of_slot[slot]
        flat = torch.cat([self.gate_up[place].flatten(), self.down[place].flatten()])
        return flat.to(dtype=torch.bfloat16, device="cpu").view(torch.uint8)

    @torch.no_grad()
    def write(self, slot: int, payload: Tensor) -> None:
        """Overwrite one slot with a payload.

        Raises:
            PayloadError: the payload does not have this model's expert size.
        """
        gate_up_HD, down_DI = self.decode(payload)
        place = self._place(slot)
        self.gate_up[place].copy_(gate_up_HD)
        self.down[place].copy_(down_DI)

    def stage(self, payloads: Mapping[int, Tensor]) -> Settle:
        """Convert payloads by slot to the compute dtype; settling is two copies.

        Raises:
            PayloadError: a payload does not have this model's expert size.
        """
        decoded = [self.decode(payload) for payload in payloads.values()]
        gate_up_MHD = torch.stack([gate_up for gate_up, _ in decoded]).to(self.gate_up)
        down_MDI = torch.stack([down for _, down in decoded]).to(self.down)

        def settle(arrive: Arrive) -> None:
            places_M = torch.tensor([self._place(slot) for slot in payloads], device=self.device)
            arrive(gate_up_MHD, down_MDI)
            self.gate_up.index_copy_(0, places_M, gate_up_MHD)
            self.down.index_copy_(0, places_M, down_MDI)

        return settle

    def decode(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """View a payload as `gate_up` and `down` of one slot in BF16; copies only to align it.

        Raises:
            PayloadError: the payload does not have this model's expert size.
        """
        _, hidden_rows, dim = self.gate_up.shape
        gate_up_size, down_size = hidden_rows * dim, hidden_rows // 2 * dim
        expected = 2 * (gate_up_size + down_size)
        check_payload(payload, expected)
        gate_up, down = payload.contiguous().view(torch.bfloat16).split([gate_up_size, down_size])
        return gate_up.view(hidden_rows, dim), down.view(dim, hidden_rows // 2)

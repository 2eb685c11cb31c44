"""`ExpertSlots`: one rank's expert slots in one layer, computed by torch.

Owns the BF16 payload of an expert: gate, up and down, each row-major and little-endian, as a BF16
checkpoint stores them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from equipoise_kernels.plain.grouped_ffn import grouped_ffn
from equipoise_model.device import Arrive
from equipoise_model.experts import Settle, check_payload


class ExpertSlots(nn.Module):
    """Weights of `num_slots` experts, in torch's default dtype unless one is given.

    `gate_up` is [slots, 2 I, D], the gate's rows before up's; `down` is [slots, D, I].
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

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""
        return int(self.gate_up.shape[0])

    @property
    def device(self) -> torch.device:
        """The device that holds the slots."""
        return self.gate_up.device

    def forward(self, x_ND: Tensor, rows_per_slot: Sequence[int]) -> Tensor:
        """Run rows in slot order through their slots' networks, [N, D]; N may be 0."""
        return grouped_ffn(x_ND, self.gate_up, self.down, rows_per_slot, row_block=self.row_block)

    @torch.no_grad()
    def read(self, slot: int) -> Tensor:
        """Read the payload of one slot into a new uint8 tensor [expert_bytes].

        Exact if the slot was written from a payload; trained float32 weights are rounded to BF16.
        """
        flat = torch.cat([self.gate_up[slot].flatten(), self.down[slot].flatten()])
        return flat.to(dtype=torch.bfloat16, device="cpu").view(torch.uint8)

    @torch.no_grad()
    def write(self, slot: int, payload: Tensor) -> None:
        """Overwrite one slot with a payload.

        Raises:
            PayloadError: the payload does not have this model's expert size.
        """
        gate_up_HD, down_DI = self.decode(payload)
        self.gate_up[slot].copy_(gate_up_HD)
        self.down[slot].copy_(down_DI)

    def stage(self, payloads: Mapping[int, Tensor]) -> Settle:
        """Convert payloads by slot to the compute dtype; settling is two copies.

        Raises:
            PayloadError: a payload does not have this model's expert size.
        """
        decoded = [self.decode(payload) for payload in payloads.values()]
        slots_M = torch.tensor(list(payloads), device=self.device)
        gate_up_MHD = torch.stack([gate_up for gate_up, _ in decoded]).to(self.gate_up)
        down_MDI = torch.stack([down for _, down in decoded]).to(self.down)

        def settle(arrive: Arrive) -> None:
            arrive(slots_M, gate_up_MHD, down_MDI)
            self.gate_up.index_copy_(0, slots_M, gate_up_MHD)
            self.down.index_copy_(0, slots_M, down_MDI)

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

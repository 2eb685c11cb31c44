"""`PlacementTables`: one generation's layout as lookup tables for dispatch.

Built off the engine's thread from a layout's numbers; a switch replaces one reference.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise_kernels.replica_choice import SHARE_BITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementTables:
    """Where every logical expert's replicas are.

    Rank r owns the physical slots [r * slots_per_rank, (r + 1) * slots_per_rank). Tables are
    read-only, and on the host until `to` copies them to the model's device.
    """

    generation: int
    """Number of the layout."""
    num_ranks: int
    """Ranks of the pool."""
    num_slots: int
    """Physical slots of the pool, per layer."""
    slots_of_expert: Tensor
    """Each expert's slots, ascending, int64 [layers, experts, most replicas]; -1 where unused."""
    replica_count: Tensor
    """Int64 [layers, experts], at least 1."""
    share_ends: Tensor | None = None
    """Where each replica's share of its expert's tokens ends, in the form of `choose_replicas` and
    the shape of `slots_of_expert`; None if all replicas share evenly."""

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.replica_count.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """Physical slots of one rank in one layer."""
        return self.num_slots // self.num_ranks

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a layer's slots of experts, numbers of replicas, and ends of shares."""
        ends = self.share_ends
        return (
            self.slots_of_expert[layer],
            self.replica_count[layer],
            None if ends is None else ends[layer],
        )

    def to(self, device: torch.device) -> Self:
        """Copy the tables to a device."""
        ends = self.share_ends
        return replace(
            self,
            slots_of_expert=self.slots_of_expert.to(device),
            replica_count=self.replica_count.to(device),
            share_ends=None if ends is None else ends.to(device),
        )

    @classmethod
    def from_layout(
        cls,
        expert_of_slot: npt.ArrayLike,
        *,
        num_experts: int,
        num_ranks: int = 1,
        generation: int = 1,
        share_of_slot: npt.ArrayLike | None = None,
    ) -> Self:
        """Build from the logical expert of every physical slot, integers [layers, slots].

        Empty slots have expert -1, and no expert chooses them.

        `share_of_slot`, of the same shape, is the share of its expert's tokens that each slot
        serves, in 1/2^SHARE_BITS; None for even shares. The layout must be valid: every expert is
        present in every layer, shares add up to 1, and the ranks divide the slots evenly.
        """
        table_LP = np.asarray(expert_of_slot, dtype=np.int64)
        num_layers, num_slots = table_LP.shape
        assert num_slots % num_ranks == 0
        used = np.flatnonzero(table_LP.ravel() >= 0)
        flat = (table_LP + np.arange(num_layers)[:, None] * num_experts).ravel()[used]
        count = np.bincount(flat, minlength=num_layers * num_experts)
        assert count.min() >= 1 and len(count) == num_layers * num_experts  # noqa: PT018
        # Sorted by expert, a slot's index among its expert's slots is its index less the expert's
        # first.
        order = np.argsort(flat, kind="stable")
        experts = flat[order]
        place = np.arange(len(flat)) - (np.cumsum(count) - count)[experts]
        slots = np.full((num_layers * num_experts, int(count.max())), -1, dtype=np.int64)
        slots[experts, place] = used[order] % num_slots
        ends = None
        if share_of_slot is not None:
            shares = np.zeros_like(slots)
            shares[experts, place] = np.asarray(share_of_slot, dtype=np.int64).ravel()[used[order]]
            ends = torch.from_numpy(shares.cumsum(axis=1).reshape(num_layers, num_experts, -1))
            assert ends[..., -1].eq(1 << SHARE_BITS).all()
        return cls(
            generation=generation,
            num_ranks=num_ranks,
            num_slots=num_slots,
            slots_of_expert=torch.from_numpy(slots.reshape(num_layers, num_experts, -1)),
            replica_count=torch.from_numpy(count.reshape(num_layers, num_experts)),
            share_ends=ends,
        )

    @classmethod
    def identity(cls, *, num_layers: int, num_experts: int) -> Self:
        """One rank, and slot e holds expert e."""
        row = np.arange(num_experts)
        return cls.from_layout(np.tile(row, (num_layers, 1)), num_experts=num_experts)

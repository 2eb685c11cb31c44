"""`Placement`: which expert each slot holds, as a file says it; a `Layout` without its history."""

from dataclasses import dataclass

import numpy as np

from equipoise.formats.errors import FormatError
from equipoise.planning.arrays import ExpertTable, ShareTable
from equipoise.planning.layout import count_replicas
from equipoise.planning.shares import fault_in_shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A table of experts, covering all of them; peers' files may hold one twice on a rank.

    `expert_of_slot` is int32 [layers, slots], MoE layers only, and is made read-only;
    `share_of_slot`, of the same shape, as in `Layout`, or None for even splits. `num_ranks`
    and `first_moe_layer` (the layer of the model that row 0 belongs to) are None in formats that do
    not say.

    Raises:
        FormatError: an expert is out of range or missing, slots do not divide over ranks, or shares
            do not sum up; it names the layer by the file's own counting.
    """

    expert_of_slot: ExpertTable
    num_experts: int
    num_ranks: int | None = None
    first_moe_layer: int | None = None
    share_of_slot: ShareTable | None = None

    def __post_init__(self) -> None:
        table = np.array(self.expert_of_slot, dtype=np.int32)
        table.flags.writeable = False
        object.__setattr__(self, "expert_of_slot", table)
        assert table.ndim == 2, "a placement is [layers, slots]"
        _check(self)
        if self.share_of_slot is not None:
            fault = fault_in_shares(self.share_of_slot, table, num_experts=self.num_experts)
            if fault is not None:
                raise FormatError(f"{fault}, counting layers from 0")

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.expert_of_slot.shape[0])

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return int(self.expert_of_slot.shape[1])

    @property
    def layer_ids(self) -> range:
        """The layers by the file's own counting: the model's, if known, else from 0."""
        first = self.first_moe_layer or 0
        return range(first, first + self.num_layers)


def _check(placement: Placement) -> None:
    table, num_experts = placement.expert_of_slot, placement.num_experts
    if not table.size:
        raise FormatError(f"there is no slot: the table is of shape {list(table.shape)}")
    outside = (table < 0) | (table >= num_experts)
    if outside.any():
        row, slot = (int(index) for index in np.argwhere(outside)[0])
        raise FormatError(
            f"layer {placement.layer_ids[row]}, slot {slot} holds expert {int(table[row, slot])}, "
            f"but experts are numbered 0 to {num_experts - 1}"
        )
    if num_experts > table.shape[1]:
        row, slot = divmod(int(table.argmax()), table.shape[1])
        raise FormatError(
            f"{table.shape[1]} slots cannot hold {num_experts} experts, but layer "
            f"{placement.layer_ids[row]}, slot {slot} holds expert {int(table[row, slot])}"
        )
    missing = count_replicas(table, num_experts=num_experts) == 0
    if missing.any():
        row, expert = (int(index) for index in np.argwhere(missing)[0])
        raise FormatError(f"layer {placement.layer_ids[row]} has no slot for expert {expert}")
    if placement.num_ranks is not None and (
        placement.num_ranks < 1 or table.shape[1] % placement.num_ranks
    ):
        raise FormatError(
            f"{table.shape[1]} slots do not divide evenly over {placement.num_ranks} ranks"
        )

"""`ExpertPlacement`: the placement in a file; a `Layout` without a generation."""

from dataclasses import dataclass

import numpy as np

from equipoise.formats.errors import FormatError
from equipoise.planning.arrays import EMPTY, ExpertTable, ShareTable
from equipoise.planning.layout import count_replicas
from equipoise.planning.shares import fault_in_shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacement:
    """A placement of all experts; other engines' files may hold one twice on a rank.

    Raises:
        FormatError: an expert is out of range or missing, slots do not divide evenly over ranks, or
            shares do not sum to the whole; the message numbers layers like the file.
    """

    expert_of_slot: ExpertTable
    """int32 [layers, slots], MoE layers only; EMPTY for a slot without expert, which only
    Equipoise's own format can express. Made read-only."""
    num_experts: int
    num_ranks: int | None = None
    """None if the format does not have it."""
    first_moe_layer: int | None = None
    """Number of row 0 in the model; None if the format does not have it."""
    share_of_slot: ShareTable | None = None
    """int32 [layers, slots], as in `Layout`; None for even splits."""

    def __post_init__(self) -> None:
        table = np.array(self.expert_of_slot, dtype=np.int32)
        table.flags.writeable = False
        object.__setattr__(self, "expert_of_slot", table)
        assert table.ndim == 2, "a placement has the shape [layers, slots]"
        _check(self)
        if self.share_of_slot is not None:
            fault = fault_in_shares(self.share_of_slot, table, num_experts=self.num_experts)
            if fault is not None:
                raise FormatError(f"{fault}, counting layers from 0")

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return int(self.expert_of_slot.shape[0])

    @property
    def num_slots(self) -> int:
        """Physical slots per layer, over all ranks."""
        return int(self.expert_of_slot.shape[1])

    @property
    def has_empty_slots(self) -> bool:
        """Whether a slot is empty."""
        return bool((self.expert_of_slot == EMPTY).any())

    @property
    def layer_ids(self) -> range:
        """Layer numbers as in the file: those of the model, if known, else from 0."""
        first = self.first_moe_layer or 0
        return range(first, first + self.num_layers)


def check_ids(table: ExpertTable, *, num_experts: int, first_layer: int, least: int) -> None:
    """Raise FormatError unless all ids are from `least` to below the number of experts."""
    outside = (table < least) | (table >= num_experts)
    if outside.any():
        row, slot = (int(index) for index in np.argwhere(outside)[0])
        raise FormatError(
            f"layer {first_layer + row}, slot {slot} holds expert {int(table[row, slot])}, "
            f"but experts are numbered 0 to {num_experts - 1}"
        )


def _check(placement: ExpertPlacement) -> None:
    table, num_experts = placement.expert_of_slot, placement.num_experts
    if not table.size:
        raise FormatError(f"there are no slots: the table has the shape {list(table.shape)}")
    check_ids(table, num_experts=num_experts, first_layer=placement.layer_ids[0], least=EMPTY)
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

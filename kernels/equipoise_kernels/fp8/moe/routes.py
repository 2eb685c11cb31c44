"""Inputs and outputs of routing, with checks: a model's rule, a layout's tables, rows' slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import require

MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """A model's routing rule, with the parameters of `plain.route`.

    Raises:
        KernelInputError: the parameters contradict each other.
    """

    num_experts: int
    num_groups: int
    """Groups of consecutive experts."""
    top_groups: int
    """Groups that a row may use."""
    top_k: int
    """Experts per row."""
    normalize: bool
    """Whether to divide weights by their sum."""
    scale: float
    """Factor of the weights."""
    shared: bool = False
    """Whether every row also goes to one more expert, numbered last: its last choice, with weight
    1."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_groups <= self.num_experts <= self.num_placed <= MAX_EXPERTS:
            raise KernelInputError(f"{self}: need 1 <= groups <= experts <= {MAX_EXPERTS}")
        if self.num_experts % self.num_groups != 0:
            raise KernelInputError(f"{self}: experts must divide into equal groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise KernelInputError(f"{self}: need 1 <= top_groups <= groups")
        if self.top_groups < self.num_groups and self.group_size < 2:
            raise KernelInputError(f"{self}: groups to choose from need 2 experts each")
        if not 1 <= self.top_k <= self.top_groups * self.group_size:
            raise KernelInputError(f"{self}: a row cannot have {self.top_k} experts")

    @property
    def num_placed(self) -> int:
        """Experts with slots: those that rows choose from, and the shared one."""
        return self.num_experts + self.shared

    @property
    def num_choices(self) -> int:
        """Slots of a row, K of `Routes`."""
        return self.top_k + self.shared

    @property
    def group_size(self) -> int:
        """Experts per group."""
        return self.num_experts // self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotTables:
    """One layer of a layout, as tables on the device.

    Raises:
        KernelInputError: the tables do not match.
    """

    slots_of_expert_ER: Tensor
    """Physical slot of each replica, int64 [E, R]; unused entries are arbitrary."""
    replica_count_E: Tensor
    """Number of replicas, int64, in 1..R."""
    share_ends_ER: Tensor | None = None
    """Where each replica's share ends, int64, in the form of `choose_replicas`; None for even
    shares."""

    def __post_init__(self) -> None:
        slots = self.slots_of_expert_ER
        require("slots_of_expert", slots, torch.int64)
        if slots.dim() != 2 or slots.shape[1] == 0:
            raise KernelInputError(f"slots_of_expert must be [E, R], not {list(slots.shape)}")
        require("slots_of_expert", slots, dense=True)
        count, ends, kind = self.replica_count_E, self.share_ends_ER, torch.int64
        require("replica_count", count, kind, shape=slots.shape[:1], contiguous=True, like=slots)
        if ends is not None:
            require("share_ends", ends, kind, shape=slots.shape, dense=True, like=slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Where rows go, by choice: experts and slots int64 [T, K], weights float32 [T, K].

    Raises:
        KernelInputError: the three do not match.
    """

    expert_ids_TK: Tensor
    slots_TK: Tensor
    weights_TK: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (
            ("expert_ids", self.expert_ids_TK, torch.int64),
            ("slots", self.slots_TK, torch.int64),
            ("weights", self.weights_TK, torch.float32),
        ):
            require(name, tensor, dtype, shape=self.slots_TK.shape, dense=True)


def empty_routes(num_rows: int, top_k: int, *, device: torch.device) -> Routes:
    """Allocate uninitialised routes."""
    shape = (num_rows, top_k)
    return Routes(
        expert_ids_TK=torch.empty(shape, dtype=torch.int64, device=device),
        slots_TK=torch.empty(shape, dtype=torch.int64, device=device),
        weights_TK=torch.empty(shape, dtype=torch.float32, device=device),
    )

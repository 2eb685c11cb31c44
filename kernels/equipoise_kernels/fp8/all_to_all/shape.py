"""Sizes that all ranks of a buffer share."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.all_to_all.payload import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class EpShape:
    """Sizes of a buffer; all ranks have the same, but for `rank`.

    Attributes:
        rank: this one.
        num_ranks: of the group.
        slots_per_rank: physical slots of one rank in one layer.
        top_k: slots that a token chooses.
        dim: columns of a row.
        max_tokens: tokens that a rank brings to one exchange at most.
        payload: how rows travel.
        capacity: rows that one rank can send to one other in an exchange. What is always enough by
            default; less takes less memory, and more rows are then an error on every rank.

    Raises:
        KernelInputError: sizes make no sense together.
    """

    rank: int
    num_ranks: int
    slots_per_rank: int
    top_k: int
    dim: int
    max_tokens: int
    payload: Payload
    capacity: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "slots_per_rank", "top_k", "dim", "max_tokens", "pair_rows"):
            if getattr(self, name) < 1:
                raise KernelInputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.rank < self.num_ranks:
            raise KernelInputError(f"rank {self.rank} is not one of {self.num_ranks} ranks")
        self.payload.row_words(self.dim)

    @property
    def num_slots(self) -> int:
        """Physical slots of all ranks."""
        return self.num_ranks * self.slots_per_rank

    @property
    def pair_rows(self) -> int:
        """Rows that one rank can send to one other in an exchange."""
        if self.capacity is not None:
            return self.capacity
        return self.max_tokens * min(self.top_k, self.slots_per_rank)

    @property
    def row_words(self) -> int:
        """Words of a row on its way to an expert."""
        return self.payload.row_words(self.dim)

    @property
    def answer_words(self) -> int:
        """Words of a row on its way back."""
        return self.payload.answer_words(self.dim)

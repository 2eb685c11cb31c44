"""Sizes that all ranks of a buffer share."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.all_to_all.payload import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class EpShape:
    """Sizes of a buffer; all ranks have the same, except for `rank`.

    Raises:
        KernelInputError: the sizes contradict each other.
    """

    rank: int
    """This rank."""
    num_ranks: int
    """Ranks of the group."""
    slots_per_rank: int
    """Physical slots of one rank in one layer."""
    top_k: int
    """Slots that a token chooses."""
    dim: int
    """Columns of a row."""
    max_tokens: int
    """Most tokens that a rank brings to one exchange."""
    payload: Payload
    """Format of rows in transit."""
    capacity: int | None = None
    """Rows that one rank can send to another in an exchange. Enough for every case by default; less
    saves memory, and more rows are then an error on every rank."""

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
        """Rows that one rank can send to another in an exchange."""
        if self.capacity is not None:
            return self.capacity
        return self.max_tokens * min(self.top_k, self.slots_per_rank)

    @property
    def row_words(self) -> int:
        """Words of a row sent to an expert."""
        return self.payload.row_words(self.dim)

    @property
    def answer_words(self) -> int:
        """Words of a row sent back."""
        return self.payload.answer_words(self.dim)

"""The order of rows on both ends of an exchange.

Shared by every backend; in torch, without waiting for the device. A sender sorts its (token,
choice) pairs by slot; a receiver groups rows by slot, within a slot by sending rank, and within a
rank by token. Equal inputs give equal orders, whatever arrives first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise_kernels.fp8.all_to_all.flags import FINE, TOO_MANY_ROWS, UNKNOWN_SLOT
from equipoise_kernels.fp8.all_to_all.shape import EpShape

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outgoing:
    """A sender's N = T * K assignments: token-expert pairs, `pair` in names."""

    order_N: Tensor
    """Pairs sorted by slot, int64; those without a slot come last."""
    counts_RS: Tensor
    """Pairs for each slot, int64 [ranks, slots]."""
    status: Tensor
    """Status for the flag, int64 [1]."""

    @classmethod
    def of_slots(cls, slots_TK: Tensor, shape: EpShape) -> Self:
        """Sort the choices of tokens, int64 [T, K]; NO_SLOT for none."""
        slots_N = slots_TK.flatten()
        known_N = (slots_N >= 0) & (slots_N < shape.num_slots)
        keys_N = torch.where(known_N, slots_N, shape.num_slots)
        sorted_N, order_N = keys_N.sort(stable=True)
        places = torch.arange(shape.num_slots + 1, device=slots_N.device)
        first = torch.searchsorted(sorted_N, places)
        counts_RS = first.diff().view(shape.num_ranks, shape.slots_per_rank)
        too_many = (counts_RS.sum(dim=1) > shape.pair_rows).any()
        too_many |= (counts_RS > shape.max_tokens).any()
        unknown = (~known_N & (slots_N != NO_SLOT)).any()
        status = torch.where(too_many, TOO_MANY_ROWS, torch.where(unknown, UNKNOWN_SLOT, FINE))
        return cls(
            order_N=order_N,
            counts_RS=counts_RS,
            status=status.view(1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where a receiver puts rows."""

    alignment: int = 1
    """Each slot's first row is at a multiple of it; rows in between are unspecified."""
    rows_per_slot: int | None = None
    """Rows reserved for every slot, filled from the first; None to pack slots."""
    is_fixed: bool = False
    """Whether the number of rows is the most that can arrive, not what does: in captured steps, and
    where a step must launch the same kernels as when it is captured."""
    most_tokens: int | None = None
    """Most tokens that any rank brings to this exchange, to save memory with `is_fixed`; the
    buffer's maximum by default."""

    def __post_init__(self) -> None:
        assert self.alignment >= 1
        assert self.rows_per_slot is None or self.alignment == 1

    def most_rows(self, shape: EpShape) -> int:
        """Rows that are enough for every exchange."""
        if self.rows_per_slot is not None:
            return self.rows_per_slot * shape.slots_per_rank
        gaps = shape.slots_per_rank * (self.alignment - 1)
        pair_rows = shape.pair_rows
        if self.most_tokens is not None:
            pair_rows = min(pair_rows, self.most_tokens * min(shape.top_k, shape.slots_per_rank))
        num_rows = shape.num_ranks * pair_rows + gaps
        return -(-num_rows // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Incoming:
    """A receiver's rows."""

    counts_RS: Tensor
    """Rows of each sending rank for each of this rank's slots, int64 [ranks, slots]."""
    starts_RS: Tensor
    """Index of the first of them among the receiver's rows, int64 [ranks, slots]."""
    rows_S: Tensor
    """Rows of each slot, int32 [slots]."""
    ends_S: Tensor
    """Where they end, int32 [slots]."""
    num_rows: Tensor
    """Rows to reserve, gaps included, int64 []."""

    @classmethod
    def of_counts(cls, counts_RS: Tensor, layout: RowLayout) -> Self:
        """Lay out rows, given their counts by origin."""
        rows_S = counts_RS.sum(dim=0)
        if layout.rows_per_slot is None:
            taken_S = (rows_S + layout.alignment - 1) // layout.alignment * layout.alignment
        else:
            taken_S = torch.full_like(rows_S, layout.rows_per_slot)
        first_S = taken_S.cumsum(dim=0) - taken_S
        return cls(
            counts_RS=counts_RS,
            starts_RS=first_S + counts_RS.cumsum(dim=0) - counts_RS,
            rows_S=rows_S.to(torch.int32),
            ends_S=(first_S + rows_S).to(torch.int32),
            num_rows=taken_S.sum(),
        )

    def places(self, ranks: Sequence[int] | None = None) -> Tensor:
        """Where each arriving row goes, by sending rank and slot: int64; waits for the device.

        Sending ranks come in the order of `ranks`, ascending by default.
        """
        order = slice(None) if ranks is None else list(ranks)
        counts_B = self.counts_RS[order].flatten()
        begin_B = self.starts_RS[order].flatten()
        within = torch.arange(int(counts_B.sum()), device=counts_B.device)
        within -= (counts_B.cumsum(0) - counts_B).repeat_interleave(counts_B)
        return begin_B.repeat_interleave(counts_B) + within


def weighted_sum(answers_TKD: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum over a token's choices in float32, choice 0 first: float32 [T, D].

    The fixed order makes the sum independent of where outputs were computed, to the last bit.
    """
    values_TKD = answers_TKD.float()
    if weights_TK is not None:
        values_TKD = values_TKD * weights_TK.unsqueeze(-1)
    total_TD, *others = values_TKD.unbind(1)
    for value_TD in others:
        total_TD = total_TD + value_TD
    return total_TD

"""Which row goes where: the order of rows on both ends of an exchange.

Owns the arithmetic that every backend shares, in torch and without waiting for the device. A sender
sorts its (token, choice) pairs by slot; a receiver groups rows by slot, in a slot by sending rank,
and of one rank by token. So equal inputs give equal orders, whatever arrives first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise_kernels.fp8.all_to_all.flags import FINE, TOO_MANY_ROWS, UNKNOWN_SLOT
from equipoise_kernels.fp8.all_to_all.shape import EpShape

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outgoing:
    """A sender's pairs, N = T * K of them.

    Attributes:
        order_N: pairs sorted by slot, int64; those without a slot come last.
        first_RS: place in that order of the first pair for each slot, int64 [ranks, slots].
        counts_RS: pairs for each slot, int64 [ranks, slots].
        segment_RS: place of each slot's first pair among those for its rank, int64 [ranks, slots].
        status: of the flag, int64 [1].
    """

    order_N: Tensor
    first_RS: Tensor
    counts_RS: Tensor
    segment_RS: Tensor
    status: Tensor

    @classmethod
    def of_slots(cls, slots_TK: Tensor, shape: EpShape) -> Self:
        """Sort the choices of tokens, int64 [T, K]; NO_SLOT is none."""
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
            first_RS=first[:-1].view_as(counts_RS),
            counts_RS=counts_RS,
            segment_RS=counts_RS.cumsum(dim=1) - counts_RS,
            status=status.view(1),
        )

    def answer_places(self, shape: EpShape) -> Tensor:
        """Where each pair's answer arrives, int64 [N], NO_SLOT without one.

        Answers of rank r lie from r * pair_rows on, in the order in which their pairs were sent.
        """
        num_pairs = self.order_N.shape[0]
        device = self.order_N.device
        place_N = torch.arange(num_pairs, device=device)
        first_R = self.first_RS[:, 0].contiguous()
        # Ranks without pairs share their first place with the next: the last one counts.
        rank_N = torch.searchsorted(first_R, place_N, right=True) - 1
        within_N = place_N - first_R[rank_N]
        sent_N = (place_N < self.counts_RS.sum()) & (within_N < shape.pair_rows)
        answers_N = torch.empty_like(self.order_N)
        arrives_N = rank_N * shape.pair_rows + within_N
        answers_N[self.order_N] = torch.where(sent_N, arrives_N, NO_SLOT)
        return answers_N


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where a receiver puts rows.

    Attributes:
        alignment: slots' first rows are multiples of it; gaps hold zeros.
        rows_per_slot: every slot has as many rows, filled from the first; None: packed.
        most_tokens: that any rank brings to this exchange, for less memory where it cannot depend
            on what comes: in a captured graph. As many as the buffer has room for by default.
    """

    alignment: int = 1
    rows_per_slot: int | None = None
    most_tokens: int | None = None

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
    """A receiver's rows.

    Attributes:
        counts_RS: rows of each sending rank for each own slot, int64 [ranks, slots].
        starts_RS: where the first of them is in the receiver's rows, int64 [ranks, slots].
        segment_RS: its place among the rows of its rank, int64 [ranks, slots].
        rows_S: rows of each slot, int32 [slots].
        ends_S: where they end, int32 [slots].
        num_rows: rows to keep, gaps included, int64 [].
    """

    counts_RS: Tensor
    starts_RS: Tensor
    segment_RS: Tensor
    rows_S: Tensor
    ends_S: Tensor
    num_rows: Tensor

    @classmethod
    def of_counts(cls, counts_RS: Tensor, layout: RowLayout) -> Self:
        """Lay out rows by how many come from where."""
        rows_S = counts_RS.sum(dim=0)
        if layout.rows_per_slot is None:
            taken_S = (rows_S + layout.alignment - 1) // layout.alignment * layout.alignment
        else:
            taken_S = torch.full_like(rows_S, layout.rows_per_slot)
        first_S = taken_S.cumsum(dim=0) - taken_S
        return cls(
            counts_RS=counts_RS,
            starts_RS=first_S + counts_RS.cumsum(dim=0) - counts_RS,
            segment_RS=counts_RS.cumsum(dim=1) - counts_RS,
            rows_S=rows_S.to(torch.int32),
            ends_S=(first_S + rows_S).to(torch.int32),
            num_rows=taken_S.sum(),
        )

    def places(self) -> Tensor:
        """Where each arriving row goes, by sending rank and slot: int64; waits for the device."""
        counts_B = self.counts_RS.flatten()
        begin_B = self.starts_RS.flatten()
        within = torch.arange(int(counts_B.sum()), device=counts_B.device)
        within -= (counts_B.cumsum(0) - counts_B).repeat_interleave(counts_B)
        return begin_B.repeat_interleave(counts_B) + within


def weighted_sum(answers_TKD: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum over a token's choices in float32, choice 0 first: float32 [T, D].

    The fixed order makes the sum independent of who computed what, to the last bit.
    """
    values_TKD = answers_TKD.float()
    if weights_TK is not None:
        values_TKD = values_TKD * weights_TK.unsqueeze(-1)
    total_TD, *others = values_TKD.unbind(1)
    for value_TD in others:
        total_TD = total_TD + value_TD
    return total_TD

"""The exchange by torch.distributed: the reference, over gloo, and over NCCL between nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.fp8.all_to_all.buffer import MAX_OPEN, ReceivedRows, SentRows
from equipoise_kernels.fp8.all_to_all.group import GroupCollectives
from equipoise_kernels.fp8.all_to_all.order import Incoming, Outgoing, RowLayout, weighted_sum
from equipoise_kernels.fp8.all_to_all.shape import EpShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CollectiveState:
    outgoing: Outgoing
    places_A: Tensor
    sent_R: list[int]
    received_R: list[int]


class CollectiveBackend:
    """See `buffer.Backend`. A rank alone needs no group.

    A dispatch begins with a wait for the headers, which say how many rows come. They must arrive
    within `timeout_s`, rows within the group's own timeout.
    """

    max_open = MAX_OPEN

    def __init__(
        self, shape: EpShape, *, group: dist.ProcessGroup | None, timeout_s: float
    ) -> None:
        self._shape = shape
        self._group = GroupCollectives(shape, group=group, timeout_s=timeout_s)

    @property
    def waited_s(self) -> float:
        """See `buffer.Backend`."""
        return self._group.waited_s

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """See `buffer.Backend`."""
        outgoing = Outgoing.of_slots(slots_TK, self._shape)
        arrived_RS = self._group.begin_headers(
            outgoing.counts_RS.cpu(), generation=generation, status=outgoing.status
        )()
        incoming = Incoming.of_counts(arrived_RS, layout)
        sent_R = outgoing.counts_RS.sum(dim=1).tolist()
        received_R = arrived_RS.sum(dim=1).tolist()
        tokens_N = outgoing.order_N[: sum(sent_R)] // self._shape.top_k
        receive = self._group.begin_rows(words_TW[tokens_N], send=sent_R, receive=received_R)

        def finish() -> ReceivedRows:
            words_AW = receive()
            places_A = incoming.places().to(words_AW.device)
            state = _CollectiveState(
                outgoing=outgoing, places_A=places_A, sent_R=sent_R, received_R=received_R
            )
            sent = SentRows(rows=sent_R, outputs=received_R)
            return ReceivedRows.placed(
                words_AW, incoming, places_A=places_A, state=state, sent=sent
            )

        return finish

    def begin_combine(
        self, y_ND: Tensor, state: _CollectiveState, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """See `buffer.Backend`."""
        words_AW = y_ND[state.places_A].view(torch.int32)
        receive = self._group.begin_rows(words_AW, send=state.received_R, receive=state.sent_R)

        def finish() -> Tensor:
            back_NW = receive()
            order_N = state.outgoing.order_N
            words_NW = back_NW.new_zeros(len(order_N), back_NW.shape[1])
            words_NW[order_N[: len(back_NW)]] = back_NW
            answers_ND = words_NW.view(y_ND.dtype)
            return weighted_sum(answers_ND.view(-1, self._shape.top_k, self._shape.dim), weights_TK)

        return finish

    def check(self) -> None:
        """See `buffer.Backend`: nothing is captured, so every fault was raised at once."""

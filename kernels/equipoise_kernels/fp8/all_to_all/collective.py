"""The exchange by torch.distributed: the reference, over gloo, and over NCCL between nodes.

A header of counts and flags is first, peer by peer, so that a missing rank can be named; exactly
the needed rows follow in one collective. The header is always on the CPU, so its group needs gloo
("cpu:gloo,cuda:nccl").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import PeerMissingError
from equipoise_kernels.fp8.all_to_all.buffer import ReceivedRows
from equipoise_kernels.fp8.all_to_all.flags import flag_of, raise_faults
from equipoise_kernels.fp8.all_to_all.order import Incoming, Outgoing, RowLayout, weighted_sum
from equipoise_kernels.fp8.all_to_all.payload import WORD_BYTES
from equipoise_kernels.fp8.all_to_all.shape import EpShape

_LEAST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CollectiveState:
    outgoing: Outgoing
    places_A: Tensor
    sent_R: list[int]
    received_R: list[int]


class CollectiveBackend:
    """See `buffer.Backend`. A rank alone needs no group.

    Headers must arrive within `timeout_s`, rows within the group's own timeout.
    """

    def __init__(
        self, shape: EpShape, *, group: dist.ProcessGroup | None, timeout_s: float
    ) -> None:
        assert shape.num_ranks == (1 if group is None else dist.get_world_size(group))
        assert shape.rank == (0 if group is None else dist.get_rank(group))
        self._shape = shape
        self._group = group
        self._timeout_s = timeout_s
        self._sequence = 0

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """See `buffer.Backend`."""
        self._sequence += 1
        outgoing = Outgoing.of_slots(slots_TK, self._shape)
        flag = flag_of(
            sequence=torch.tensor([self._sequence]),
            generation=generation.cpu(),
            status=outgoing.status.cpu(),
        )
        counts_RS = outgoing.counts_RS.cpu()
        receive_headers = self._exchange_headers(flag, counts_RS)

        def finish() -> ReceivedRows:
            headers = receive_headers()
            seen = [None if header is None else int(header[0]) for header in headers]
            raise_faults(seen, own=int(flag), timeout_s=self._timeout_s, what="rows")
            arrived_RS = torch.stack([header[1:] for header in headers if header is not None])
            incoming = Incoming.of_counts(arrived_RS, layout)
            return self._exchange_rows(words_TW, outgoing, incoming)

        return finish

    def begin_combine(
        self, y_ND: Tensor, state: _CollectiveState, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """See `buffer.Backend`; outputs are sent when the returned callable is called."""

        def finish() -> Tensor:
            words_AW = y_ND[state.places_A].view(torch.int32)
            back_NW = self._all_to_all(words_AW, send=state.received_R, receive=state.sent_R)
            num_pairs = state.outgoing.order_N.shape[0]
            words_NW = back_NW.new_zeros(num_pairs, back_NW.shape[1])
            words_NW[state.outgoing.order_N[: back_NW.shape[0]]] = back_NW
            answers_ND = words_NW.view(y_ND.dtype)
            return weighted_sum(answers_ND.view(-1, self._shape.top_k, self._shape.dim), weights_TK)

        return finish

    def check(self) -> None:
        """See `buffer.Backend`: nothing is captured, so every fault was raised at once."""

    def _exchange_rows(
        self, words_TW: Tensor, outgoing: Outgoing, incoming: Incoming
    ) -> ReceivedRows:
        sent_R = outgoing.counts_RS.sum(dim=1).tolist()
        received_R = incoming.counts_RS.sum(dim=1).tolist()
        tokens_N = outgoing.order_N[: sum(sent_R)] // self._shape.top_k
        words_AW = self._all_to_all(words_TW[tokens_N], send=sent_R, receive=received_R)
        places_A = incoming.places().to(words_AW.device)
        words_NW = words_AW.new_empty(int(incoming.num_rows), words_AW.shape[1])
        words_NW[places_A] = words_AW
        return ReceivedRows(
            words_NW=words_NW,
            rows_S=incoming.rows_S.to(words_AW.device),
            ends_S=incoming.ends_S.to(words_AW.device),
            state=_CollectiveState(
                outgoing=outgoing, places_A=places_A, sent_R=sent_R, received_R=received_R
            ),
        )

    def _exchange_headers(
        self, flag: Tensor, counts_RS: Tensor
    ) -> Callable[[], list[Tensor | None]]:
        """Send each rank its counts; the returned callable gives every rank's header, None if late.

        A header is int64 [1 + slots]: the flag, then rows for each slot of the receiver.
        """
        headers_RH = torch.cat([flag.expand(len(counts_RS), 1), counts_RS], dim=1)
        received_RH = torch.empty_like(headers_RH)
        received_RH[self._shape.rank] = headers_RH[self._shape.rank]
        peers = [rank for rank in range(self._shape.num_ranks) if rank != self._shape.rank]
        works: dict[int, Any] = {}
        broken: set[int] = set()
        sending = []
        for peer in peers:
            try:
                works[peer] = dist.irecv(received_RH[peer], group=self._group, group_src=peer)
                sending.append(
                    dist.isend(headers_RH[peer].clone(), group=self._group, group_dst=peer)
                )
            except RuntimeError:
                broken.add(peer)

        def receive() -> list[Tensor | None]:
            until = time.monotonic() + self._timeout_s
            # Sends must outlive their receivers' wait.
            assert len(sending) + len(broken) == len(peers)
            late = broken | {peer for peer in works if not _has_come(works[peer], until=until)}
            return [None if rank in late else header for rank, header in enumerate(received_RH)]

        return receive

    def _all_to_all(self, words_NW: Tensor, *, send: list[int], receive: list[int]) -> Tensor:
        if self._group is None:
            return words_NW
        received = words_NW.new_empty(sum(receive), words_NW.shape[1])
        try:
            dist.all_to_all_single(received, words_NW, receive, send, group=self._group)
        except RuntimeError as error:
            raise PeerMissingError(
                f"rows of {WORD_BYTES * words_NW.shape[1]} bytes could not be exchanged, because "
                f"one of the {self._shape.num_ranks} ranks is gone or stuck: {error}",
                ranks=(),
            ) from error
        return received


def _has_come(work: Any, *, until: float) -> bool:
    """Wait for a header; False if its rank is gone or late."""
    left_s = max(_LEAST_WAIT_S, until - time.monotonic())
    try:
        return bool(work.wait(timedelta(seconds=left_s)))
    except RuntimeError:
        return False

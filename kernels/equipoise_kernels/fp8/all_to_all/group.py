"""`GroupCollectives`: headers and rows of an exchange, by the collectives of torch.distributed.

A header goes from rank to rank, so that a missing rank can be named; it is always on the CPU, so
its group needs gloo ("cpu:gloo,cuda:nccl"). Exactly the needed rows follow in collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import PeerMissingError
from equipoise_kernels.fp8.all_to_all.flags import flag_of, raise_faults
from equipoise_kernels.fp8.all_to_all.payload import WORD_BYTES
from equipoise_kernels.fp8.all_to_all.shape import EpShape

_LEAST_WAIT_S = 0.001


class GroupCollectives:
    """One rank of a group; a rank alone needs none.

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
        self.waited_s = 0.0
        """Total seconds of waits for headers and rows."""

    def begin_headers(
        self, numbers_RH: Tensor, *, generation: Tensor, status: Tensor
    ) -> Callable[[], Tensor]:
        """Send each rank its numbers, int64; the returned callable gives those of every rank.

        Raises:
            AllToAllError: from the callable: a rank is missing, or reports a fault.
        """
        self._sequence += 1
        flag = flag_of(
            sequence=torch.tensor([self._sequence]),
            generation=generation.cpu(),
            status=status.cpu(),
        )
        receive = self._exchange(torch.cat([flag.expand(len(numbers_RH), 1), numbers_RH], dim=1))

        def finish() -> Tensor:
            with self._waiting():
                headers = receive()
            seen = [None if header is None else int(header[0]) for header in headers]
            raise_faults(seen, own=int(flag), timeout_s=self._timeout_s, what="rows")
            return torch.stack([header[1:] for header in headers if header is not None])

        return finish

    def begin_rows(
        self, words_NW: Tensor, *, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Send each rank its rows, in rank order; the returned callable gives those that come.

        Raises:
            PeerMissingError: here or from the callable: a rank is gone or stuck.
        """
        if self._group is None:
            return lambda: words_NW
        received = words_NW.new_empty(sum(receive), words_NW.shape[1])
        words_NW = words_NW.contiguous()
        try:
            work: Any = dist.all_to_all_single(
                received, words_NW, list(receive), list(send), group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise self._missing(words_NW, error) from error

        def finish() -> Tensor:
            try:
                with self._waiting():
                    work.wait()
            except RuntimeError as error:
                # The rows must outlive the work.
                raise self._missing(words_NW, error) from error
            return received

        return finish

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def _missing(self, words_NW: Tensor, error: RuntimeError) -> PeerMissingError:
        return PeerMissingError(
            f"rows of {WORD_BYTES * words_NW.shape[1]} bytes could not be exchanged, because "
            f"one of the {self._shape.num_ranks} ranks is gone or stuck: {error}",
            ranks=(),
        )

    def _exchange(self, headers_RH: Tensor) -> Callable[[], list[Tensor | None]]:
        """Send headers; the returned callable gives every rank's, None if late."""
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


def _has_come(work: Any, *, until: float) -> bool:
    """Wait for a header; False if its rank is gone or late."""
    left_s = max(_LEAST_WAIT_S, until - time.monotonic())
    try:
        return bool(work.wait(timedelta(seconds=left_s)))
    except RuntimeError:
        return False

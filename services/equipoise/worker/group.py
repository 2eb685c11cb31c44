"""`RankGroup`: the process group of an epoch's ranks, and the header they exchange before a step.

Owns forming it, and turning its failures into words. What a header means is `header`'s business.
"""

import re
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from equipoise.worker.errors import GroupError
from equipoise.worker.header import HEADER_WIDTH, StepHeader, pack, unpack

_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 2.0


class RankGroup:
    """Ranks that step together over gloo; a rank alone needs no group and exchanges nothing.

    Every collective of the group is bounded by the timeout it was formed with. Used from the
    engine's thread only, once it is formed.
    """

    def __init__(self, *, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._gathered = torch.zeros(num_ranks * HEADER_WIDTH, dtype=torch.int64)
        # Kept, because the other ranks' connections end with rank 0's store.
        self._store: object = None

    @classmethod
    def alone(cls) -> Self:
        """The only rank of its pool."""
        return cls(rank=0, num_ranks=1)

    @classmethod
    def form(
        cls,
        *,
        rendezvous_address: str,
        rank: int,
        num_ranks: int,
        listener: socket.socket,
        meet_timeout_s: float,
        step_timeout_s: float,
        given_up: threading.Event,
    ) -> Self:
        """Meet the other ranks at rank 0's `rendezvous_address` (host:port).

        `listener` is the socket that this worker announced for its own rendezvous; rank 0 takes it
        over, so that nobody else can have taken the port meanwhile, and other ranks close it.
        Waits at most `meet_timeout_s` for the others, and not much longer than until `given_up` is
        set; then every collective is bounded by `step_timeout_s`.

        Raises:
            GroupError: the ranks did not meet in time.
        """
        if num_ranks == 1:
            listener.close()
            return cls.alone()
        group = cls(rank=rank, num_ranks=num_ranks)
        patience = _Patience(until=time.monotonic() + meet_timeout_s, given_up=given_up)
        try:
            store = _open_store(rendezvous_address, rank=rank, listener=listener, patience=patience)
            # torch bounds the forming by the collectives' timeout, so all must be here before.
            store.set(_arrived(rank), "")
            while not store.check([_arrived(peer) for peer in range(num_ranks)]):
                patience.wait()
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=step_timeout_s),
            )
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise GroupError(
                f"the {num_ranks} ranks did not meet at {rendezvous_address} within "
                f"{meet_timeout_s:g} s: {first_line(error)}"
            ) from error
        group._store = store
        return group

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What collectives run on; None for a rank alone."""
        return None if self.num_ranks == 1 else dist.group.WORLD

    def exchange(self, header: StepHeader) -> tuple[StepHeader, ...]:
        """Give one's own header and get all ranks', in rank order.

        Raises:
            GroupError: a rank did not answer in time, or its connection broke.
        """
        if self.num_ranks == 1:
            return (header,)
        row = torch.tensor(pack(header), dtype=torch.int64)
        try:
            dist.all_gather_single(self._gathered, row)
        except RuntimeError as error:
            raise GroupError(collective_failed(error)) from error
        return tuple(unpack(row) for row in self._gathered.view(-1, HEADER_WIDTH).tolist())

    def close(self) -> None:
        """Leave the group; the other ranks' next collective fails."""
        if self.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    """How long to wait for the others: `until` a monotonic time, or `given_up`."""

    until: float
    given_up: threading.Event

    def wait(self) -> None:
        """Wait a little, if there is patience left; else raise TimeoutError."""
        if self.given_up.wait(_POLL_S) or time.monotonic() > self.until:
            raise TimeoutError("some are not here yet")


def _open_store(address: str, *, rank: int, listener: socket.socket, patience: _Patience) -> Any:
    """Host the ranks' store as rank 0, or reach it as another; a TCPStore, untyped by torch."""
    host, _, port = address.rpartition(":")
    hosted = None
    if rank == 0:
        hosted = listener.detach()
    else:
        listener.close()
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                is_master=rank == 0,
                timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=hosted,
            )
        except RuntimeError:
            # A native wait cannot be given up, so it is short and repeated.
            if rank == 0:
                raise
            patience.wait()


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def collective_failed(error: Exception) -> str:
    """What to tell people when a collective of a step failed."""
    return f"a peer rank failed or hangs, so this group cannot take a step: {first_line(error)}"


def first_line(error: Exception) -> str:
    """What a message of torch says, without where in its sources and what it guesses."""
    line = str(error).strip().partition("\n")[0]
    line = re.sub(r"\[/[^\]]*\] ", "", line).partition(". This is typically")[0]
    return line[:300] or type(error).__name__

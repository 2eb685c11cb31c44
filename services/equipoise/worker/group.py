"""`RankGroup`: the process group of an epoch's ranks, and the header they exchange before a step.

Owns forming it, and turning its failures into words. What a header means is `header`'s business.
"""

import socket
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from equipoise.worker.errors import GroupError
from equipoise.worker.header import HEADER_WIDTH, StepHeader, pack, unpack


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
    ) -> Self:
        """Meet the other ranks at rank 0's `rendezvous_address` (host:port).

        `listener` is the socket that this worker announced for its own rendezvous; rank 0 takes it
        over, so that nobody else can have taken the port meanwhile, and other ranks close it.
        Waits at most `meet_timeout_s` for the others; then every collective is bounded by
        `step_timeout_s`.

        Raises:
            GroupError: the ranks did not meet in time.
        """
        if num_ranks == 1:
            listener.close()
            return cls.alone()
        group = cls(rank=rank, num_ranks=num_ranks)
        try:
            store = _open_store(
                rendezvous_address, rank=rank, listener=listener, timeout_s=meet_timeout_s
            )
            # torch bounds the forming by the collectives' timeout, so all must be here before.
            store.set(_arrived(rank), "")
            store.wait([_arrived(peer) for peer in range(num_ranks)])
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=step_timeout_s),
            )
        except (RuntimeError, ValueError) as error:
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


def _open_store(address: str, *, rank: int, listener: socket.socket, timeout_s: float) -> Any:
    """Host the ranks' store as rank 0, or reach it as another; a TCPStore, untyped by torch."""
    host, _, port = address.rpartition(":")
    hosted = None
    if rank == 0:
        hosted = listener.detach()
    else:
        listener.close()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=hosted,
    )


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def collective_failed(error: Exception) -> str:
    """What to tell people when a collective of a step failed."""
    return f"a peer rank failed or hangs, so this group cannot take a step: {first_line(error)}"


def first_line(error: Exception) -> str:
    """The beginning of a message of torch, which may go on with a native stack."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__

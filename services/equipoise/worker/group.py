"""The process group of an epoch's ranks: `Rendezvous` and `meet` form it, `RankGroup` uses it.

`RankGroup` exchanges the header before every step; `header` decides what the headers mean.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from equipoise.settings.address import parse_address
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.worker.errors import GroupError, StepTimeoutError
from equipoise.worker.header import (
    HEADER_WIDTH,
    Arrival,
    StepHeader,
    check_arrivals,
    digest_word,
    peers_digest,
)
from equipoise.worker.torch_workarounds import interruptible_store, reset_group_count

_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 2.0
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)  # gloo's and NCCL's wording


class RankGroup:
    """The ranks that step together in an epoch; a single rank exchanges nothing.

    Every collective is bounded by the timeout that the group was formed with. Only the engine's
    thread uses a formed group.
    """

    def __init__(
        self,
        *,
        epoch: int,
        rank: int,
        names: tuple[str, ...],
        peers_digest: int = 0,
        store: object = None,
    ) -> None:
        """`names` are the workers' names in rank order; `store` is what formed the group.

        `peers_digest` is as in `StepHeader`.
        """
        self.epoch = epoch
        self.rank = rank
        self.names = names
        self.peers_digest = peers_digest
        self.waited_s = 0.0
        """Total time spent in header exchanges, seconds."""
        self._gathered = torch.zeros(self.num_ranks * HEADER_WIDTH, dtype=torch.int64)
        # torch may read from the store at any time, so it lives as long as the group.
        self._store = store

    @classmethod
    def alone(cls, name: str, *, epoch: int = 1) -> Self:
        """Return the group of a pool with a single rank."""
        return cls(epoch=epoch, rank=0, names=(name,))

    @property
    def num_ranks(self) -> int:
        """Number of ranks, this one included."""
        return len(self.names)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What collectives run on; None for a single rank."""
        return None if self.num_ranks == 1 else dist.group.WORLD

    def exchange(self, header: StepHeader) -> tuple[StepHeader, ...]:
        """Send this rank's header and return all ranks' headers, in rank order.

        Raises:
            GroupError: a rank did not answer in time, or its connection failed.
        """
        if self.num_ranks == 1:
            return (header,)
        row = torch.tensor(header, dtype=torch.int64)
        began = time.perf_counter()
        try:
            dist.all_gather_single(self._gathered, row)
        except RuntimeError as error:
            raise collective_failed(error) from error
        self.waited_s += time.perf_counter() - began
        rows = self._gathered.view(-1, HEADER_WIDTH).tolist()
        return tuple(map(StepHeader._make, rows))

    def close(self) -> None:
        """Leave the group; the other ranks' next collective fails."""
        if self.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


class Rendezvous:
    """The store through which ranks find each other; every worker hosts one for its lifetime.

    An epoch uses that of its rank 0. The address therefore never changes, and no other process can
    take the port between two epochs.
    """

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Stop hosting it; clients that still wait on it fail."""
        self._store = None


def meet(
    join_epoch: JoinEpoch,
    *,
    step_timeout_s: float,
    abandoned: threading.Event,
    on_met: Callable[[], None],
    device: torch.device,
    announcement: str,
    check: Callable[[tuple[str, ...]], None],
) -> RankGroup:
    """Form an epoch's group at the rendezvous of its rank 0.

    Calls `on_met` once, when all ranks have arrived and before they form the group: from then on no
    peer needs what this rank held before. Waits at most the message's `meet_timeout_s` for the
    other ranks, and returns shortly after `abandoned` is set. Afterwards every collective times out
    after `step_timeout_s`. `device` holds the rows that the ranks will exchange.

    Every rank publishes its `announcement` in an `Arrival`. Ranks that were sent different peers or
    layouts form no group. `check` receives all announcements in rank order before `on_met`, and may
    raise ValueError or RuntimeError to reject.

    Raises:
        GroupError: the ranks did not meet or form in time, or do not agree.
    """
    epoch, rank = join_epoch.epoch, join_epoch.rank
    names = tuple(peer.worker for peer in join_epoch.peers)
    if len(names) == 1:
        check((announcement,))
        on_met()
        return RankGroup(epoch=epoch, rank=rank, names=names)
    address, timeout_s = join_epoch.rendezvous_address, join_epoch.meet_timeout_s
    deadline_s = time.monotonic() + timeout_s
    try:
        with interruptible_store(address, deadline_s=deadline_s, abandoned=abandoned):
            store = _connect(address, deadline_s=deadline_s, abandoned=abandoned)
            # An earlier epoch may have left keys behind.
            store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"epoch-{epoch}", store
            )
            # torch bounds forming by the collectives' timeout, so all ranks must arrive first.
            keys = [f"arrived/{number}" for number in range(len(names))]
            store.set(keys[rank], Arrival.of(join_epoch, announcement=announcement).to_json())
            while not store.check(keys):
                _pause(deadline_s=deadline_s, abandoned=abandoned)
            _agree([store.get(key).decode() for key in keys], names, check=check, epoch=epoch)
            on_met()
            _form(join_epoch, store, step_timeout_s=step_timeout_s, device=device)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise GroupError(
            f"the {len(names)} ranks of epoch {epoch} did not all reach the rendezvous at "
            f"{address} within {timeout_s:g} s: {first_line(error)}"
        ) from error
    digest = digest_word(peers_digest(join_epoch.peers))
    return RankGroup(epoch=epoch, rank=rank, names=names, peers_digest=digest, store=store)


def backend(device: torch.device) -> str:
    """Return torch's backend: gloo on the host, and NCCL for rows that live on a GPU.

    Headers stay on the CPU and therefore on gloo: reading them must not wait for the GPU.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def bound_nccl(environment: MutableMapping[str, str]) -> None:
    """Make NCCL's collectives block the host up to the group's timeout, unless already set.

    Otherwise they are only enqueued: a dead peer surfaces at the next read from the device, and
    torch's watchdog ends the process. Call before forming a group.
    """
    environment.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")


def _agree(
    published: Sequence[str],
    names: tuple[str, ...],
    *,
    check: Callable[[tuple[str, ...]], None],
    epoch: int,
) -> None:
    """Check all ranks' arrivals; reports a disagreement as such, not as a failure to meet."""
    try:
        arrivals = [Arrival.from_json(text) for text in published]
        check_arrivals(arrivals, names=names)
        check(tuple(one.announcement for one in arrivals))
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"the {len(names)} ranks of epoch {epoch} met but do not agree: {first_line(error)}"
        ) from error


def _form(
    join_epoch: JoinEpoch, store: Any, *, step_timeout_s: float, device: torch.device
) -> None:
    """Connect to the other ranks, which all do so now.

    A dead rank is retried for `step_timeout_s`; gloo waits about five times as long for one that
    accepts connections and does not answer.
    """
    if device.type == "cuda":
        bound_nccl(os.environ)
    num_ranks = len(join_epoch.peers)
    try:
        dist.init_process_group(
            backend(device),
            store=store,
            rank=join_epoch.rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=step_timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        reset_group_count()
        raise GroupError(
            f"the {num_ranks} ranks of epoch {join_epoch.epoch} met but could not form a "
            f"process group: {first_line(error)}"
        ) from error


def _connect(address: str, *, deadline_s: float, abandoned: threading.Event) -> Any:
    """Connect to the rendezvous; returns a TCPStore, which torch does not type."""
    host, port = parse_address(address)
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                is_master=False,
                timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError:
            # A native wait cannot be interrupted, so it is short and repeated.
            _pause(deadline_s=deadline_s, abandoned=abandoned)


def _pause(*, deadline_s: float, abandoned: threading.Event) -> None:
    """Sleep between two polls; raises TimeoutError if abandoned or past the deadline."""
    if abandoned.wait(_POLL_S):
        raise TimeoutError("abandoned")
    if time.monotonic() > deadline_s:
        raise TimeoutError("some ranks have not arrived")


def collective_failed(error: Exception) -> GroupError:
    """Return the error to raise when a collective of a step failed."""
    kind = StepTimeoutError if _TIMED_OUT.search(str(error)) else GroupError
    return kind(
        f"a peer rank failed or hangs, so this group cannot take a step: {first_line(error)}"
    )


def first_line(error: Exception) -> str:
    """Return a torch error's message without its source location and its guesses."""
    line = str(error).strip().partition("\n")[0]
    line = re.sub(r"\[/[^\]]*\] ", "", line).partition(". This is typically")[0]
    return line[:600] or type(error).__name__

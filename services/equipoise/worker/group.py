"""The process group of an epoch's ranks: `Rendezvous` and `meet` form it, `RankGroup` uses it.

`RankGroup` exchanges the header before every step; `header` decides what the headers mean.
"""

import math
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

from equipoise.rank.errors import GroupError
from equipoise.rank.header import (
    HEADER_WIDTH,
    Arrival,
    StepHeader,
    check_arrivals,
    digest_word,
    peers_digest,
)
from equipoise.settings.address import parse_address
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.worker.errors import StepTimeoutError
from equipoise.worker.torch_workarounds import (
    interruptible_store,
    reset_group_count,
    set_group_timeout,
)

_POLL_S = 0.05
_GRACE_S = 0.5
_CONNECT_TIMEOUT_S = 2.0
_MIN_FORM_TIMEOUT_S = 1.0
_GLOO_PATIENCE = 5  # In units of its timeout: gloo's Pair::waitUntilConnected.
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
        self._gathered = torch.zeros(self.num_ranks, HEADER_WIDTH, dtype=torch.int64)
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
            dist.all_gather(list(self._gathered.unbind()), row)
        except RuntimeError as error:
            raise collective_failed(error) from error
        self.waited_s += time.perf_counter() - began
        return tuple(map(StepHeader._make, self._gathered.tolist()))

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
    timeout_s: float,
    step_timeout_s: float,
    abandoned: threading.Event,
    on_met: Callable[[], None],
    device: torch.device,
    announcement: str,
    check: Callable[[tuple[str, ...]], None],
) -> RankGroup:
    """Form an epoch's group at the rendezvous of its rank 0.

    Calls `on_met` once, when all ranks have arrived and before they form the group: from then on no
    peer needs what this rank held before. Waits at most `timeout_s` for the other ranks to arrive,
    then `step_timeout_s` until all are ready to form, and about as long until they have formed.
    Returns shortly after `abandoned` is set. Afterwards every collective times out after
    `step_timeout_s`. `device` holds the rows that the ranks will exchange.

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
    address, deadline = join_epoch.rendezvous_address, _Deadline(timeout_s, abandoned=abandoned)
    try:
        with interruptible_store(address, is_over=deadline.is_long_over):
            store = _connect(address, deadline)
            # An earlier epoch may have left keys behind.
            store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"epoch-{epoch}", store
            )
            arrival = Arrival.of(join_epoch, announcement=announcement).to_json()
            arrivals = _await_all(store, "there", join_epoch, value=arrival, deadline=deadline)
            _agree(arrivals, names, check=check, epoch=epoch)
            deadline.restart(math.inf)  # It waits for no rank while it writes its slots.
            on_met()
            deadline.restart(step_timeout_s)
            _form(join_epoch, store, deadline, step_timeout_s=step_timeout_s, device=device)
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
        arrivals = _arrivals(published, names)
        check_arrivals(arrivals, names=names)
        check(tuple(one.announcement for one in arrivals))
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"the {len(names)} ranks of epoch {epoch} met but do not agree: {first_line(error)}"
        ) from error


def _arrivals(published: Sequence[str], names: tuple[str, ...]) -> list[Arrival]:
    arrivals = []
    for name, text in zip(names, published, strict=True):
        try:
            arrivals.append(Arrival.from_json(text))
        except ValueError as error:
            raise ValueError(f"{name} published {error}: restart it with this release") from None
    return arrivals


class _Deadline:
    """Ends waits at a time, or once the epoch is abandoned. For one thread and its watcher."""

    def __init__(self, timeout_s: float, *, abandoned: threading.Event) -> None:
        self._abandoned = abandoned
        self.restart(timeout_s)

    def restart(self, timeout_s: float) -> None:
        """Wait for something else from here on, at most that long."""
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def is_long_over(self) -> bool:
        """Whether a native call still blocks although the wait should have ended."""
        return self._abandoned.is_set() or time.monotonic() > self._end_s + _GRACE_S

    def pause(self, missing: str) -> None:
        """Sleep between two polls; raises TimeoutError if what is `missing` is so for too long."""
        if self._abandoned.wait(_POLL_S):
            raise TimeoutError("abandoned")
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"{missing} within {self._timeout_s:g} s")


def _await_all(
    store: Any, what: str, join_epoch: JoinEpoch, *, value: str, deadline: _Deadline
) -> list[str]:
    """Publish this rank's value under a name; return those of all ranks once they are there.

    Raises:
        TimeoutError: a rank is missing, which it names, or the epoch was abandoned.
    """
    keys = [f"{what}/{peer.rank}" for peer in join_epoch.peers]
    store.set(keys[join_epoch.rank], value)
    missing = list(zip(keys, join_epoch.peers, strict=True))
    while missing:
        key, peer = missing[-1]
        if store.check([key]):
            missing.pop()
        else:
            deadline.pause(f"rank {peer.rank} ({peer.worker}) was not {what}")
    return [store.get(key).decode() for key in keys]


def _form(
    join_epoch: JoinEpoch,
    store: Any,
    deadline: _Deadline,
    *,
    step_timeout_s: float,
    device: torch.device,
) -> None:
    """Connect to the other ranks once all of them are about to.

    Gloo waits five times its timeout for a peer that has published its address and does not answer.
    So it gets a fifth of the timeout to form, and the whole of it for the steps.
    """
    if device.type == "cuda":
        bound_nccl(os.environ)
    num_ranks = len(join_epoch.peers)
    form_timeout_s = max(_MIN_FORM_TIMEOUT_S, step_timeout_s / _GLOO_PATIENCE)
    try:
        _await_all(store, "ready", join_epoch, value="", deadline=deadline)
        deadline.restart((1 + _GLOO_PATIENCE) * form_timeout_s)
        dist.init_process_group(
            backend(device),
            store=store,
            rank=join_epoch.rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=form_timeout_s),
        )
        set_group_timeout(step_timeout_s)
    except (RuntimeError, ValueError, TimeoutError) as error:
        if not dist.is_initialized():
            reset_group_count()
        raise GroupError(
            f"the {num_ranks} ranks of epoch {join_epoch.epoch} met but could not form a "
            f"process group: {first_line(error)}"
        ) from error


def _connect(address: str, deadline: _Deadline) -> Any:
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
            deadline.pause("it did not answer")


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

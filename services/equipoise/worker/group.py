"""`RankGroup`: the process group of an epoch's ranks, and the header they exchange before a step.

Owns forming it (`Rendezvous`, `meet`), and turning its failures into words. What a header means is
`header`'s business.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from equipoise.settings.address import parse_address
from equipoise.worker.errors import GroupError, StepTimeoutError
from equipoise.worker.header import HEADER_WIDTH, StepHeader, pack, unpack

_HOST = torch.device("cpu")
_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 2.0
_GRACE_S = 0.5
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)  # in the words of gloo, and of NCCL


class RankGroup:
    """Ranks that step together; a rank alone needs no group and exchanges nothing.

    Every collective of the group is bounded by the timeout it was formed with. `waited_s` is how
    long exchanges of headers took so far. Used from the engine's thread only, once it is formed.
    """

    def __init__(self, *, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.waited_s = 0.0
        self._gathered = torch.zeros(num_ranks * HEADER_WIDTH, dtype=torch.int64)
        # torch reads from it whenever it likes, so it lives as long as the group.
        self._store: object = None

    @classmethod
    def alone(cls) -> Self:
        """The only rank of its pool."""
        return cls(rank=0, num_ranks=1)

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
        began = time.perf_counter()
        try:
            dist.all_gather_single(self._gathered, row)
        except RuntimeError as error:
            raise collective_failed(error) from error
        self.waited_s += time.perf_counter() - began
        return tuple(unpack(row) for row in self._gathered.view(-1, HEADER_WIDTH).tolist())

    def keep(self, store: object) -> None:
        """Hold on to the store that it was formed by."""
        self._store = store

    def close(self) -> None:
        """Leave the group; the other ranks' next collective fails."""
        if self.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


class Rendezvous:
    """The store by which ranks find each other, hosted by every worker for its whole life.

    An epoch uses that of its rank 0. So the address never changes, and nobody else can take the
    port between two epochs.
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
        """Host it no more; whoever waits at it fails."""
        self._store = None


def meet(
    address: str,
    *,
    epoch: int,
    rank: int,
    num_ranks: int,
    step_timeout_s: float,
    meet_timeout_s: float,
    given_up: threading.Event,
    met: Callable[[], None],
    device: torch.device = _HOST,
    told: str = "",
    hear: Callable[[tuple[str, ...]], None] = lambda _told: None,
) -> RankGroup:
    """Form an epoch's group at rank 0's rendezvous `address` (host:port).

    `met` is called once when all ranks are there and before they form: from then on nobody needs
    what this one held before. Waits at most `meet_timeout_s` for the others, and not much longer
    than until `given_up` is set; then every collective is bounded by `step_timeout_s`. `device` is
    where the rows are that the ranks will exchange.

    `told` is a word to all ranks; `hear` gets all of them, in rank order, before anything changes,
    and may refuse by raising ValueError or RuntimeError.

    Raises:
        GroupError: the ranks did not meet or form in time, or do not agree.
    """
    if num_ranks == 1:
        hear((told,))
        met()
        return RankGroup.alone()
    until = time.monotonic() + meet_timeout_s
    try:
        with _cutting_off(address, until=until, given_up=given_up):
            store = _reach(address, until=until, given_up=given_up)
            # An epoch before may have left its marks.
            store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"epoch-{epoch}", store
            )
            # torch bounds the forming by the collectives' timeout, so all must be here before.
            store.set(_arrived(rank), told)
            arrived = [_arrived(peer) for peer in range(num_ranks)]
            while not store.check(arrived):
                _wait(until=until, given_up=given_up)
            words = tuple(store.get(key).decode() for key in arrived)
            _agree(words, hear=hear, epoch=epoch)
            met()
            group = RankGroup(rank=rank, num_ranks=num_ranks)
            _form(group, store, epoch=epoch, step_timeout_s=step_timeout_s, device=device)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise GroupError(
            f"the {num_ranks} ranks of epoch {epoch} did not meet at {address} within "
            f"{meet_timeout_s:g} s: {first_line(error)}"
        ) from error
    group.keep(store)
    return group


def backend(device: torch.device) -> str:
    """What collectives run on: gloo; for a model on a GPU its rows go by NCCL.

    Headers stay on the CPU, and so on gloo, in either case: reading them must not wait for the GPU.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def bound_nccl(environment: MutableMapping[str, str]) -> None:
    """Have NCCL's collectives wait on the host, within the group's timeout, unless set already.

    Else they are only enqueued: a dead peer shows at whatever reads from the device next, and
    torch's watchdog ends the process. To be called before a group is formed.
    """
    environment.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")


def _form(
    group: RankGroup, store: Any, *, epoch: int, step_timeout_s: float, device: torch.device
) -> None:
    """Connect to the other ranks, who all do so now.

    One that is gone is looked for as long as a step may take; gloo tries for some five times as
    long where it is there and does not answer.
    """
    if device.type == "cuda":
        bound_nccl(os.environ)
    try:
        dist.init_process_group(
            backend(device),
            store=store,
            rank=group.rank,
            world_size=group.num_ranks,
            timeout=timedelta(seconds=step_timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        _forget_attempts()
        raise GroupError(
            f"the {group.num_ranks} ranks of epoch {epoch} met but did not form: "
            f"{first_line(error)}"
        ) from error


def _forget_attempts() -> None:
    """Have torch name the next group as in a process that never tried to form one.

    torch names a group by how many this process has tried to form, and ranks look for each other
    under that name: where one attempt more has failed than elsewhere, no group would ever form
    again. Only the end of a group makes it count anew, so one of this rank alone is formed and
    ended.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


def _agree(words: tuple[str, ...], *, hear: Callable[[tuple[str, ...]], None], epoch: int) -> None:
    """Have all ranks' words heard; a disagreement is no failure to meet."""
    try:
        hear(words)
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"the {len(words)} ranks of epoch {epoch} met but do not agree: {first_line(error)}"
        ) from error


def _reach(address: str, *, until: float, given_up: threading.Event) -> Any:
    """A connection to the rendezvous; a TCPStore, untyped by torch."""
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
            # A native wait cannot be given up, so it is short and repeated.
            _wait(until=until, given_up=given_up)


def _wait(*, until: float, given_up: threading.Event) -> None:
    """Wait a little, if there is patience left; else raise TimeoutError."""
    if given_up.wait(_POLL_S):
        raise TimeoutError("given up")
    if time.monotonic() > until:
        raise TimeoutError("some are not here yet")


@contextmanager
def _cutting_off(address: str, *, until: float, given_up: threading.Event) -> Iterator[None]:
    """End a native call inside the block that waits for a hung host beyond the bound.

    torch reads answers of a store without a timeout; the only way out is to cut the connection.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            if given_up.is_set() or time.monotonic() > until + _GRACE_S:
                _cut_connections(address)

    watcher = threading.Thread(target=watch, name="rendezvous watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _cut_connections(address: str) -> None:
    """Shut down this process's connections to an address, whoever owns them."""
    host, port = parse_address(address)
    ips = _ips(host)
    for open_file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # It may be gone meanwhile, or not connected.
            if not open_file.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(open_file.name))) as connection:
                peer = connection.getpeername()
                if not isinstance(peer, tuple) or peer[1] != port:
                    continue
                if ips is None or _plain(peer[0]) in ips:
                    connection.shutdown(socket.SHUT_RDWR)


def _ips(host: str) -> set[str | int] | None:
    """Addresses of a host; None where its name is gone, as that of a pod that ended."""
    try:
        return {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None


def _plain(ip: str) -> str:
    """An IPv4 address as such, also where it was told as an IPv6 one."""
    return ip.removeprefix("::ffff:")


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def collective_failed(error: Exception) -> GroupError:
    """What to raise and tell people when a collective of a step failed."""
    kind = StepTimeoutError if _TIMED_OUT.search(str(error)) else GroupError
    return kind(
        f"a peer rank failed or hangs, so this group cannot take a step: {first_line(error)}"
    )


def first_line(error: Exception) -> str:
    """What a message of torch says, without where in its sources and what it guesses."""
    line = str(error).strip().partition("\n")[0]
    line = re.sub(r"\[/[^\]]*\] ", "", line).partition(". This is typically")[0]
    return line[:300] or type(error).__name__

"""Workarounds for torch.distributed, each with the upstream issue whose fix makes it obsolete."""

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from equipoise.settings.address import parse_address

_POLL_S = 0.05
_OPEN_FILES = Path("/proc/self/fd")


def collect_process_groups() -> None:
    """Free destroyed process groups before the interpreter exits.

    A group that is still alive at exit occasionally aborts the process with "terminate called
    without an active exception" (https://github.com/pytorch/pytorch/issues/190489).
    """
    gc.collect()


def reset_group_count() -> None:
    """Make torch name the next group as in a process that never failed to form one.

    torch names a group by how many groups this process tried to create, and ranks find each other
    under that name. A failed attempt counts (https://github.com/pytorch/pytorch/issues/46561), so
    a rank with one more failure than its peers never forms a group again. Only destroying a group
    resets the count, so this creates and destroys a group of one.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


def set_group_timeout(timeout_s: float) -> None:
    """Set the timeout of the default group's collectives, which torch binds to that of forming it.

    Public in later versions (https://github.com/pytorch/pytorch/pull/187387).
    """
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001


@contextmanager
def interruptible_store(address: str, *, is_over: Callable[[], bool]) -> Iterator[None]:
    """Bound the store calls made inside the block, even if the store's host (`address`) hangs.

    A TCPStore client reads replies without a timeout, except in `wait`
    (https://github.com/pytorch/pytorch/pull/100594). Once `is_over` returns True, this shuts down
    the connections to `address` that were opened since the block began, so that the blocked call
    raises. `is_over` is called from another thread.
    """
    before = _open_sockets()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            if is_over():
                _shut_down_connections(address, keep=before)

    watcher = threading.Thread(target=watch, name="rendezvous watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _open_sockets() -> dict[str, int]:
    """The process's open sockets: file descriptor by the kernel's name, such as "socket:[4711]"."""
    sockets = {}
    for open_file in _OPEN_FILES.iterdir():
        with suppress(OSError):  # It may have been closed in the meantime.
            name = str(open_file.readlink())
            if name.startswith("socket:"):
                sockets[name] = int(open_file.name)
    return sockets


def _shut_down_connections(address: str, *, keep: dict[str, int]) -> None:
    host, port = parse_address(address)
    ips = _ips(host)
    for name, number in _open_sockets().items():
        if name in keep:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            peer = connection.getpeername()
            if not isinstance(peer, tuple) or peer[1] != port:
                continue
            if ips is None or peer[0].removeprefix("::ffff:") in ips:
                connection.shutdown(socket.SHUT_RDWR)


def _ips(host: str) -> set[str | int] | None:
    """The host's addresses; None if its name no longer resolves, as that of a terminated pod."""
    try:
        return {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None

"""Memory of a node's ranks that is mapped into each other, and its map.

There are three ways to get it: a file in shared memory (processes on a CPU, with kernels in
Triton's interpreter), CUDA symmetric memory (a GPU per rank), and one allocation for several
virtual ranks in one process.

A rank's window has, for each of two parities and each sending rank: the flags of both directions,
the header of counts, a slab of rows and a slab of answers. Exchange n uses parity n % 2, so that
two may be in flight. No rank writes into a slab before its reader is done: a rank sends dispatch n
+ 2 after its combine n, which needs the combines of all others, and they have then read dispatch n.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d

from equipoise_kernels.fp8.all_to_all.payload import WORD_BYTES
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window_store import RendezvousStore

NUM_PARITIES = 2
_NUMBER_BYTES = 8
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMap:
    """Offsets in bytes of a window's parts, each [parities, sending ranks, ..]."""

    flags: int
    """Flags of dispatches, int64."""
    answer_flags: int
    """Flags of combines, int64."""
    counts: int
    """Rows for each slot, int64 [.., slots]."""
    rows: int
    """Int32 [.., pair_rows, row_words]."""
    answers: int
    """Int32 [.., pair_rows, answer_words]."""
    num_bytes: int
    """Size of a window."""

    @classmethod
    def of_shape(cls, shape: EpShape) -> WindowMap:
        """Build the map that all ranks of a buffer share."""
        areas = NUM_PARITIES * shape.num_ranks
        sizes = (
            areas * _NUMBER_BYTES,
            areas * _NUMBER_BYTES,
            areas * shape.slots_per_rank * _NUMBER_BYTES,
            areas * shape.pair_rows * shape.row_words * WORD_BYTES,
            areas * shape.pair_rows * shape.answer_words * WORD_BYTES,
        )
        offsets = [0]
        for size in sizes:
            offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        flags, answer_flags, counts, rows, answers, num_bytes = offsets
        return cls(
            flags=flags,
            answer_flags=answer_flags,
            counts=counts,
            rows=rows,
            answers=answers,
            num_bytes=num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerWindow:
    """One rank's memory, and the addresses of the others'."""

    local: Tensor
    """This rank's memory, uint8 [num_bytes], zeros before the first exchange."""
    addresses: Tensor
    """Start of each rank's window in this rank's address space, int64 [ranks]."""
    owner: Any = None
    """Keeps the mapping alive."""


def shared_window(path: Path, shape: EpShape) -> PeerWindow:
    """Map a file that all ranks name, usually in /dev/shm: POSIX shared memory.

    Every group uses a new name, and the rank that created it removes the file. The file is as large
    as all windows, and zeros at first, whichever rank opens it first.
    """
    num_bytes = WindowMap.of_shape(shape).num_bytes
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, shape.num_ranks * num_bytes)
        mapping = mmap.mmap(descriptor, shape.num_ranks * num_bytes)
    finally:
        os.close(descriptor)
    everything = torch.frombuffer(mapping, dtype=torch.uint8)
    return _parts(everything.view(shape.num_ranks, num_bytes), owner=mapping)[shape.rank]


def virtual_windows(shape: EpShape, *, device: torch.device | str) -> list[PeerWindow]:
    """Windows of all ranks in one process and on one device, by rank."""
    num_bytes = WindowMap.of_shape(shape).num_bytes
    everything = torch.zeros(shape.num_ranks, num_bytes, dtype=torch.uint8, device=device)
    return _parts(everything, owner=everything)


def symmetric_window(
    shape: EpShape, *, group: dist.ProcessGroup, device: torch.device
) -> PeerWindow:
    """Map a window in CUDA symmetric memory; all ranks of the group, on one node, call it together.

    Raises:
        RuntimeError: torch cannot map the ranks' memory into each other.
    """
    num_bytes = WindowMap.of_shape(shape).num_bytes
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    with rendezvous_group(shape, group=group) as name:
        # May fail on one rank alone, behind what all ranks do together: the others then wait for
        # its key in the store, and not in a collective that the rank has left out.
        local = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        handle = _SymmetricMemory.rendezvous(local, name)
    local.zero_()
    # No rank may send before all flags are zero; the caller makes all ranks wait for that.
    torch.cuda.current_stream(device).synchronize()
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    return PeerWindow(local=local, addresses=addresses, owner=handle)


@contextmanager
def rendezvous_group(shape: EpShape, *, group: dist.ProcessGroup) -> Iterator[str]:
    """Register a group of the same ranks for one rendezvous, under a new name that they share.

    Torch takes a rendezvous's ranks and store from what is registered under the name: from
    `set_group_info` in some releases, and from a process group in others.
    """
    names: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, group=group, group_src=0)
    (name,) = names
    shared = PrefixStore(name, distributed_c10d._get_process_group_store(group))  # noqa: SLF001
    store = RendezvousStore(shared)
    _SymmetricMemory.set_group_info(name, shape.rank, shape.num_ranks, store)
    registered = dist.ProcessGroup(store, shape.rank, shape.num_ranks)
    _register_process_group(name, registered)
    try:
        yield name
    finally:
        _unregister_process_group(name)


def _parts(everything_RB: Tensor, *, owner: Any) -> list[PeerWindow]:
    addresses = torch.tensor(
        [window.data_ptr() for window in everything_RB],
        dtype=torch.int64,
        device=everything_RB.device,
    )
    return [PeerWindow(local=local, addresses=addresses, owner=owner) for local in everything_RB]

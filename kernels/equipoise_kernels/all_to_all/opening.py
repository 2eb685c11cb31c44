"""`open_buffer`: an `EpBuffer` over a group, by the backend that was selected for this process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist

from equipoise_kernels import selection
from equipoise_kernels.all_to_all.buffer import Backend, EpBuffer
from equipoise_kernels.all_to_all.collective import CollectiveBackend
from equipoise_kernels.all_to_all.deep_ep import DeepEpBackend
from equipoise_kernels.all_to_all.peer import PeerBackend
from equipoise_kernels.all_to_all.shape import EpShape
from equipoise_kernels.all_to_all.window import Window, shared_window, symmetric_window

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where POSIX keeps it, not a temporary folder


def open_buffer(
    shape: EpShape, *, group: dist.ProcessGroup, device: torch.device | str, timeout_s: float
) -> EpBuffer:
    """Open a buffer; all ranks of the group call it together, and have selected alike.

    Forming is bounded by the group's own timeout, every later wait by `timeout_s`; rows in one
    collective, and DeepEP's, by their own.

    Raises:
        KernelInputError: the backend cannot carry the payload.
        RuntimeError: a rank is gone, or ranks cannot map each other's memory.
    """
    device = torch.device(device)
    name = selection.backend("all_to_all", device)
    backend: Backend
    if name == "deep_ep":
        backend = DeepEpBackend(shape, group=group)
    elif name == "triton":
        window = (
            symmetric_window(shape, group=group, device=device)
            if device.type == "cuda"
            else _agreed_window(shape, group=group)
        )
        backend = PeerBackend(shape, window, timeout_s=timeout_s)
    else:
        backend = CollectiveBackend(shape, group=group, timeout_s=timeout_s)
    return EpBuffer(shape, backend, device=device)


def _agreed_window(shape: EpShape, *, group: dist.ProcessGroup) -> Window:
    """A window in a file that rank 0 names, and removes once all ranks have mapped it."""
    names: list[str] = [""]
    if shape.rank == 0:
        folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        descriptor, names[0] = tempfile.mkstemp(prefix="equipoise-", dir=folder)
        os.close(descriptor)
    try:
        dist.broadcast_object_list(names, group=group, group_src=0)
        window = shared_window(Path(names[0]), shape)
        dist.barrier(group)
    finally:
        if shape.rank == 0:
            Path(names[0]).unlink()
    return window

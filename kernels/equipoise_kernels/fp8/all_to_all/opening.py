"""`open_buffer`: an `EpBuffer` over a group, with the best backend that works for all ranks.

Selection lists what each rank could run, but only together can ranks find out whether they reach
each other's memory. They try one backend after the other, each with an exchange whose result is
known, and all take the first that works for all.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import KernelsUnavailableError
from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.deep_ep import ROW_MULTIPLE, DeepEpBackend
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.peer import PeerBackend
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import PeerWindow, shared_window, symmetric_window
from equipoise_kernels.fp8.quant.group_quant import group_quant

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where POSIX keeps it, not a temporary folder
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OPERATION = "all_to_all"
_DEEP_EP, _PEER = "deep_ep", "triton"
_COMPILING_S = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedBuffer:
    """A buffer, and what the ranks agreed on."""

    buffer: EpBuffer
    """This rank's end."""
    shape: EpShape
    """Sizes of the buffer; its payload is BF16 if the backend supports no other."""
    backend: str
    """Name of the backend, as in `selection`."""
    passed_over: Mapping[str, str]
    """Why each preferred backend was not used."""

    @property
    def is_low_latency(self) -> bool:
        """Whether the buffer only has the low-latency pair of calls."""
        return self.backend == _DEEP_EP

    @property
    def capture_obstacle(self) -> str | None:
        """Why the backend's exchanges cannot be captured in a CUDA graph, or None."""
        if self.backend == selection.REFERENCE:
            return "torch.distributed needs the number of rows on the host"
        return None


def open_buffer(
    shape: EpShape, *, group: dist.ProcessGroup, device: torch.device | str, timeout_s: float
) -> OpenedBuffer:
    """Open a buffer. All ranks of the group call this together, with the same selection.

    Opening is bounded by the group's own timeout, every later wait by `timeout_s`; except that rows
    in one collective, and DeepEP's exchanges, have their own timeouts.

    Raises:
        KernelsUnavailableError: the backends named in the settings do not work for all ranks.
        RuntimeError: another rank is gone.
    """
    device = torch.device(device)
    passed_over: dict[str, str] = {}
    for name in _candidates(device):
        own = _shape_for(name, shape)
        try:
            buffer = _opened(name, own, group=group, device=device, timeout_s=timeout_s)
        except KernelsUnavailableError as error:
            passed_over[name] = str(error)
        else:
            return OpenedBuffer(buffer=buffer, shape=own, backend=name, passed_over=passed_over)
    reasons = "; ".join(f"{name}, because {why}" for name, why in passed_over.items())
    raise KernelsUnavailableError(
        f"no backend of {_OPERATION} serves all ranks ({reasons}): set {selection.VARIABLE}="
        f"{selection.AUTO} to use what can"
    )


def _candidates(device: torch.device) -> Sequence[str]:
    """Backends to try: the selected one, then the others that all ranks can run."""
    first = selection.backend(_OPERATION, device)
    if first == selection.REFERENCE:
        return (first,)
    possible = selection.current().possible[_OPERATION]
    return possible[possible.index(first) :]


def _shape_for(name: str, shape: EpShape) -> EpShape:
    if name != _DEEP_EP:
        return shape
    room = -(-shape.max_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    return replace(shape, payload=Payload.BF16, max_tokens=room)


def _opened(
    name: str,
    shape: EpShape,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float,
) -> EpBuffer:
    """A buffer whose backend has carried rows there and back; raises on all ranks or none."""
    if name == selection.REFERENCE:
        collective = CollectiveBackend(shape, group=group, timeout_s=timeout_s)
        buffer = EpBuffer(shape, collective, device=device)
        # Finds what the group's library cannot do here, such as NCCL with ranks on one GPU.
        _by_all(lambda: _try_out(buffer, shape, is_low_latency=False, device=device), group=group)
        return buffer
    if name == _PEER:
        machines = set(_told(_machine(), group=group))
        if len(machines) > 1:
            raise KernelsUnavailableError(f"the ranks are on {len(machines)} machines")
        window = (
            _by_all(lambda: symmetric_window(shape, group=group, device=device), group=group)
            if device.type == "cuda"
            else _agreed_window(shape, group=group)
        )
        return _opened_peer(shape, window, group=group, device=device, timeout_s=timeout_s)
    assert name == _DEEP_EP
    library = _by_all(lambda: DeepEpBackend(shape, group=group), group=group)
    buffer = EpBuffer(shape, library, device=device)
    _by_all(lambda: _try_out(buffer, shape, is_low_latency=True, device=device), group=group)
    return buffer


def _opened_peer(
    shape: EpShape,
    window: PeerWindow,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float,
) -> EpBuffer:
    """A buffer by peer pointers, tried out.

    The first exchange compiles kernels. Ranks that have them in their cache wait for those that do
    not, longer than for any later exchange.
    """
    backend = PeerBackend(shape, window, timeout_s=max(timeout_s, _COMPILING_S))
    buffer = EpBuffer(shape, backend, device=device)
    _by_all(lambda: _try_out(buffer, shape, is_low_latency=False, device=device), group=group)
    backend.wait_at_most(timeout_s)
    if device.type == "cuda":
        backend.measure_polls()
    return buffer


def _try_out(
    buffer: EpBuffer, shape: EpShape, *, is_low_latency: bool, device: torch.device
) -> None:
    """Send one row to slots of all ranks, and check that it comes back as many times."""
    chosen = min(shape.top_k, shape.num_slots)
    slots_1K = torch.full((1, shape.top_k), -1, dtype=torch.int64, device=device)
    # One slot of each rank in turn, starting with the next rank's.
    turns = torch.arange(chosen, device=device)
    ranks, places = (shape.rank + 1 + turns) % shape.num_ranks, turns // shape.num_ranks
    slots_1K[0, :chosen] = ranks * shape.slots_per_rank + places
    value = 1.0 + shape.rank % 8  # exact in every payload
    x_1D = torch.full((1, shape.dim), value, dtype=shape.payload.answer_dtype, device=device)
    weights_1K = torch.ones(1, shape.top_k, device=device)
    dispatch = buffer.low_latency_dispatch if is_low_latency else buffer.dispatch
    came = dispatch(group_quant(x_1D) if shape.payload is Payload.FP8 else x_1D, slots_1K)
    rows = came.rows if isinstance(came.rows, Tensor) else came.rows.dequantized()
    answers = rows.to(shape.payload.answer_dtype)
    summed_1D = buffer.combine(answers, came.handle, weights_TK=weights_1K)
    if not bool((summed_1D == chosen * value).all()):
        raise KernelsUnavailableError("rows did not come back unchanged")


def _by_all(work: Callable[[], Result], *, group: dist.ProcessGroup) -> Result:
    """Run this rank's work, and return its result once it succeeded on every rank.

    Raises:
        KernelsUnavailableError: on all ranks, if any of them failed.
    """
    fault = ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  any failure is reported to all ranks
        fault = f"{type(error).__name__}: {error}"
    faults = [f"rank {rank}: {word}" for rank, word in enumerate(_told(fault, group=group)) if word]
    if faults:
        raise KernelsUnavailableError("; ".join(faults))
    return result


def _told(word: str, *, group: dist.ProcessGroup) -> list[str]:
    """Gather every rank's string, in rank order."""
    words: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(words, word, group=group)
    return words


def _machine() -> str:
    """An identifier that only processes of one machine share."""
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else socket.gethostname()


def _agreed_window(shape: EpShape, *, group: dist.ProcessGroup) -> PeerWindow:
    """A window in a file that rank 0 names, and removes once all ranks have mapped it."""
    names: list[str] = [""]
    if shape.rank == 0:
        folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        descriptor, names[0] = tempfile.mkstemp(prefix="equipoise-", dir=folder)
        os.close(descriptor)
    try:
        dist.broadcast_object_list(names, group=group, group_src=0)
        return _by_all(lambda: shared_window(Path(names[0]), shape), group=group)
    finally:
        if shape.rank == 0:
            Path(names[0]).unlink()

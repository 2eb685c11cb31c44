"""Where a model computes: the choice of a device, and copies that overlap computation.

All tensors of a step are on one device, that of the model's own tensors; nothing is remembered
between calls.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor

AUTO = "auto"

_CPU_BUILD = ", because this PyTorch is a build without CUDA: install PyPI's"

Arrive = Callable[..., None]
"""Makes the device's computation wait for copies, and keeps the given tensors' memory until it has;
the host does not wait."""


class DeviceError(ValueError):
    """This machine does not have the device; the message lists what it has."""


def choose_device(wanted: str, *, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:N` means here.

    `auto` is a CUDA device if there is one, else the CPU. Without a number, it is the device
    LOCAL_RANK names where processes share a machine's devices, else the first that this process
    sees (a pod sees only its own).

    Raises:
        DeviceError: there is no such device.
    """
    kind, _, number = wanted.partition(":")
    if wanted == AUTO:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and not number:
        return torch.device("cpu")
    if kind != "cuda" or (":" in wanted and not _is_number(number)):
        raise DeviceError(f"{wanted!r} is not a device: choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        number = environment.get("LOCAL_RANK", "0")
        if not _is_number(number):
            raise DeviceError(f"LOCAL_RANK is {number!r}: set it to a number, or name the device")
    if int(number) >= count:
        raise DeviceError(
            f"there is no device cuda:{number}: this process sees {count} CUDA device(s)"
            f"{_CPU_BUILD if torch.version.cuda is None else ''}; choose another one, or cpu"
        )
    return torch.device("cuda", int(number))


def compute_dtype(*, on_gpu: bool) -> torch.dtype:
    """What the plain plane holds weights, activations and latents in, and multiplies.

    BF16 on a GPU, as checkpoints store it. Float32 on a CPU, where BF16 products are several times
    slower.
    """
    return torch.bfloat16 if on_gpu else torch.float32


def name_of(device: torch.device) -> str:
    """A device's human-readable name, such as `cuda:0 (NVIDIA H200)`."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def use(device: torch.device) -> None:
    """Make a device current for the calling thread; its kernels launch there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def beside(device: torch.device, *, overwrites: bool = True) -> Iterator[Arrive]:
    """Copy to a device on a separate stream, so that no step waits for the copies.

    Copies wait for the steps so far, unless all of them are to new memory: `overwrites` is False.

    Call the yielded function after the block, on the thread that computes, before the first use of
    what was copied. On the CPU, copies are complete when they return.
    """
    if device.type != "cuda":
        yield lambda *_tensors: None
        return
    stream, event = _stream_beside(device, "to"), torch.cuda.Event()

    def arrive(*tensors: Tensor) -> None:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(event)
        # The allocator must not reuse the memory while the computation's stream reads it.
        for tensor in tensors:
            tensor.record_stream(computing)

    if overwrites:
        # The last computation may still be reading what is overwritten.
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield arrive
        event.record(stream)


def to_host(parts: Sequence[Tensor]) -> Tensor:
    """Copy one-dimensional tensors of one device and dtype into a new one on the host, in order.

    The copy is on a separate stream and only the calling thread waits for it: no step does.
    """
    device, dtype = parts[0].device, parts[0].dtype
    if device.type != "cuda":
        return torch.cat(list(parts))
    sizes = [part.numel() for part in parts]
    # Copies to memory that is not pinned wait for the whole device.
    whole = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
    stream = _stream_beside(device, "from")
    # What the computation has queued may still be writing these tensors.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, part in zip(whole.split(sizes), parts, strict=True):
            target.copy_(part, non_blocking=True)
            part.record_stream(stream)
    stream.synchronize()
    return whole


@cache
def _stream_beside(device: torch.device, _direction: Literal["to", "from"]) -> torch.cuda.Stream:
    """The stream of all copies in one direction; the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()

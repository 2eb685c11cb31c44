"""Where a model computes: the choice of a device, and copies that run beside the computation.

Everything a step touches lies on one device, which the model's own tensors tell; nothing here is
remembered between calls.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

AUTO = "auto"

Arrive = Callable[..., None]
"""Makes the device's computation wait for copies before it goes on, and keeps the memory of the
given tensors until it has; the host waits for nothing."""


class DeviceError(ValueError):
    """A device that this machine does not have; the message says what it has."""


def choose_device(wanted: str, *, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here.

    `auto` is a CUDA device where there is one, else the CPU. Without a number it is the first that
    this process sees (a pod sees its own only), or that of LOCAL_RANK where processes share a
    machine's devices.

    Raises:
        DeviceError: there is no such device.
    """
    kind, _, number = wanted.partition(":")
    if wanted == AUTO:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and not number:
        return torch.device("cpu")
    if kind != "cuda" or (":" in wanted and not _is_number(number)):
        raise DeviceError(f"{wanted!r} is no device: choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        number = environment.get("LOCAL_RANK", "0")
        if not _is_number(number):
            raise DeviceError(f"LOCAL_RANK is {number!r}: give a number, or the device itself")
    if int(number) >= count:
        raise DeviceError(
            f"there is no device cuda:{number}: this process sees {count} CUDA device(s); choose "
            "another one, or cpu"
        )
    return torch.device("cuda", int(number))


def name_of(device: torch.device) -> str:
    """A device as people know it, such as `cuda:0 (NVIDIA H200)`."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def use(device: torch.device) -> None:
    """Make a device the calling thread's own: kernels are launched there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def beside(device: torch.device) -> Iterator[Arrive]:
    """Run copies to a device on a stream of their own, so that no step waits for them.

    What is yielded is to be called, behind the block and on the thread that computes, before the
    first use of what was copied. On the CPU copies are done when they return.
    """
    if device.type != "cuda":
        yield lambda *_tensors: None
        return
    stream, event = torch.cuda.Stream(device), torch.cuda.Event()

    def arrive(*tensors: Tensor) -> None:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(event)
        # The allocator must not give the memory away while the computation's stream reads it.
        for tensor in tensors:
            tensor.record_stream(computing)

    # What is overwritten may be in use by what was computed last.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield arrive
        event.record(stream)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()

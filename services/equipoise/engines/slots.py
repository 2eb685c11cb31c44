"""`EngineSlots`: one MoE layer's expert slots of this rank, over an engine's own tensors."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.planning.layout import Layout
from equipoise.rank.errors import NotHeldError, StageRejectedError
from equipoise_model.device import Arrive
from equipoise_model.experts import Settle, check_payload

_Tables = TypeVar("_Tables")


class EngineSlots:
    """Reads and writes slots in place; CUDA graphs keep the tensors' addresses.

    An expert's payload is the concatenated bytes of its rows in all tensors, weights and scales, in
    the engine's order and format.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` are [slots, ...] each, with the same number of slots on one device.

        Raises:
            UnsupportedEngineError: an expert's row is not contiguous, or shared with others; or
                tensors have different numbers of slots.
        """
        self._tensors = tuple(tensors)
        if len({len(tensor) for tensor in self._tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._tensors)
            raise UnsupportedEngineError(
                f"its experts have tensors of different lengths ({shapes}): use another "
                "quantization or MoE backend"
            )
        for tensor in self._tensors:
            _check_rows(tensor)
        self._sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        # The latest writes of the engine's thread, on its stream; None on a CPU.
        self._settled: torch.Event | None = None
        # Held by each read; the engine's thread waits for it only before memory is released.
        self._reading = threading.Lock()
        self._is_open = True

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""
        return int(self._tensors[0].shape[0])

    @property
    def memory(self) -> frozenset[int]:
        """Addresses of the memory that the tensors are in."""
        return _memory(self._tensors)

    @property
    def device(self) -> torch.device:
        """The device that holds the slots."""
        return self._tensors[0].device

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's payload."""
        return sum(self._sizes)

    def close(self) -> None:
        """Let nobody read from here on: the engine is about to release the memory."""
        with self._reading:
            self._is_open = False

    def open(self) -> None:
        """Let anybody read again: the memory is back, at the same addresses."""
        with self._reading:
            self._is_open = True

    def note_written(self) -> None:
        """Let reads wait for what the calling thread has queued on its stream."""
        if self.device.type != "cpu":
            self._settled = torch.get_device_module(self.device).Event()
            self._settled.record()

    def read(self, slot: int) -> Tensor:
        """Read the payload of one slot into a new uint8 tensor [expert_bytes] on the host.

        Raises:
            NotHeldError: the slots are closed.
        """
        with self._reading:
            if not self._is_open:
                raise NotHeldError("the engine sleeps: its weights are not in memory")
            return self._read(slot)

    @torch.no_grad()
    def _read(self, slot: int) -> Tensor:
        rows = [_as_bytes(tensor[slot]) for tensor in self._tensors]
        if self.device.type == "cpu":
            return torch.cat(rows)
        # Not on the engine's stream, which must not wait; but after what was written on it.
        streams, stream = torch.get_device_module(self.device), _reading_stream(self.device)
        stream.wait_stream(streams.default_stream(self.device))
        if self._settled is not None:  # Some engines compute on a stream of their own.
            stream.wait_event(self._settled)
        with streams.stream(stream):
            return torch.cat(rows).to("cpu")

    def empty(self, slot: int) -> None:
        """An engine's layers do not share places: `Hello.num_places` is 0."""
        raise AssertionError(f"slot {slot} of an engine is never empty")

    def stage(self, payloads: Mapping[int, Tensor]) -> Settle:
        """Copy payloads by slot to the device; settling is one copy for each tensor.

        Raises:
            PayloadError: a payload does not have this model's expert size.
        """
        for payload in payloads.values():
            check_payload(payload, self.expert_bytes)
        slots = torch.tensor(list(payloads), device=self.device)
        parts = [payload.split(self._sizes) for payload in payloads.values()]
        staged = [
            torch.stack([_as_rows(part[index], tensor) for part in parts]).to(self.device)
            for index, tensor in enumerate(self._tensors)
        ]
        on_host = self.device.type == "cpu"
        settled = None if on_host else torch.get_device_module(self.device).Event()

        def settle(arrive: Arrive) -> None:
            arrive(slots, *staged)
            for tensor, rows in zip(self._tensors, staged, strict=True):
                # As bytes: `index_copy_` does not know every quantised type.
                _byte_rows(tensor).index_copy_(0, slots, _byte_rows(rows))
            if settled is not None:
                settled.record()
                self._settled = settled

        return settle


@cache
def _reading_stream(device: torch.device) -> Any:
    """The stream that slots of a device are read on: the allocator keeps memory for each stream."""
    return torch.get_device_module(device).Stream(device)


def while_in_use(
    make: Callable[[Layout], _Tables], slots: Sequence[EngineSlots], model: Any
) -> Callable[[Layout], _Tables]:
    """Make tables only while `model`, a torch module, computes with the memory of `slots`.

    When an engine loads weights again, some quantizations give its layers other memory. What is
    moved between the old slots would not be what the new tables name.

    Returns what raises StageRejectedError then.
    """
    watched = frozenset().union(*(one.memory for one in slots)) & _parameters(model)

    def checked(layout: Layout) -> _Tables:
        if not watched <= _parameters(model):
            raise StageRejectedError(
                "the engine has put updated weights into other memory: restart it to balance it "
                "again"
            )
        return make(layout)

    return checked


def _parameters(model: Any) -> frozenset[int]:
    parameters = getattr(model, "parameters", None)
    return _memory(parameters()) if parameters is not None else frozenset()


def _memory(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _check_rows(tensor: Tensor) -> None:
    row = tensor[0]
    is_apart = len(tensor) == 1 or tensor.stride(0) >= row.numel()
    try:
        _byte_rows(tensor)
        is_viewed = row.is_contiguous()
    except RuntimeError:
        is_viewed = False
    if not (is_viewed and is_apart):
        raise UnsupportedEngineError(
            f"its experts have a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}, whose rows cannot be copied as bytes: use another quantization or "
            "MoE backend"
        )


def _as_bytes(row: Tensor) -> Tensor:
    return row.contiguous().view(-1).view(torch.uint8)


def _as_rows(part: Tensor, like: Tensor) -> Tensor:
    """View bytes as a row of `like`; copies to align them."""
    return part.clone().view(like.dtype).view(like.shape[1:])


def _byte_rows(tensor: Tensor) -> Tensor:
    """View a tensor [slots, ...] as bytes [slots, bytes]."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)

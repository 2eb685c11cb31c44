"""`EngineSlots`: one MoE layer's expert slots of this rank, over an engine's own tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise_model.device import Arrive
from equipoise_model.experts import Settle, check_payload


class EngineSlots:
    """Reads and writes slots in place; CUDA graphs keep the tensors' addresses.

    An expert's payload is the concatenated bytes of its rows in all tensors, weights and scales, in
    the engine's order and format.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` are [slots, ...] each, with the same number of slots on one device."""
        self._tensors = tuple(tensors)
        self._sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        # The end of the copies of the last switch, on the engine's stream; None on a CPU.
        self._settled: torch.Event | None = None

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""
        return int(self._tensors[0].shape[0])

    @property
    def device(self) -> torch.device:
        """The device that holds the slots."""
        return self._tensors[0].device

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's payload."""
        return sum(self._sizes)

    @torch.no_grad()
    def read(self, slot: int) -> Tensor:
        """Read the payload of one slot into a new uint8 tensor [expert_bytes] on the host."""
        rows = [_as_bytes(tensor[slot]) for tensor in self._tensors]
        if self.device.type == "cpu":
            return torch.cat(rows)
        # Not on the engine's stream, which must not wait; but after what was written on it.
        streams = torch.get_device_module(self.device)
        stream = streams.Stream(self.device)
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

        # The copy must not find a tensor that it cannot view in place.
        for tensor in self._tensors:
            _byte_rows(tensor)
        return settle


def _as_bytes(row: Tensor) -> Tensor:
    return row.contiguous().view(-1).view(torch.uint8)


def _as_rows(part: Tensor, like: Tensor) -> Tensor:
    """View bytes as a row of `like`; copies to align them."""
    return part.clone().view(like.dtype).view(like.shape[1:])


def _byte_rows(tensor: Tensor) -> Tensor:
    """View a tensor [slots, ...] as bytes [slots, bytes]."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)

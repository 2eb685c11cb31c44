"""`Fp8ExpertSlots`: one rank's expert slots in one layer in FP8, behind a map in device memory.

Owns the FP8 payload of an expert: codes of gate, up and down, then their scales, as in an FP8
checkpoint. Weights are at places of a slab, which has more places than there are slots. Staging
fills spare places, and a switch changes the map of slots to places: weights do not move and
addresses do not change, so captured CUDA graphs stay valid. Experts staged beyond the spare places
are copied at the switch.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise_kernels.formats import (
    CODE,
    GROUP,
    QuantizedRows,
    QuantizedWeight,
    ScaleFormat,
    weight_scale_shape,
)
from equipoise_kernels.fp8.gemm.grouped import grouped_gemm
from equipoise_kernels.fp8.gemm.schedule import GROUP_ALIGNMENT, MaskedRows, PrefixSumRows
from equipoise_kernels.fp8.moe.permute import combine, permute
from equipoise_kernels.fp8.moe.row_order import RowOrder, most_rows, order_rows
from equipoise_kernels.fp8.quant.group_quant import group_quant
from equipoise_kernels.fp8.quant.silu_mul_quant import silu_mul_quant
from equipoise_model.device import Arrive, to_host
from equipoise_model.experts import NO_PLACE, Settle, check_payload

_BLOCK = GROUP_ALIGNMENT
"""Rows per block of one slot's expert; blocks are filled up with padding rows."""


class Fp8ExpertSlots(nn.Module):
    """Weights of `num_slots` experts, and `num_spare` more places.

    `gate_up` is [places, 2 I, D], the gate's rows before up's; `down` is [places, D, I].
    `place_of_slot` is int32 [slots] on the device.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        num_slots: int,
        num_spare: int,
        scale_format: ScaleFormat,
    ) -> None:
        super().__init__()
        assert dim % GROUP == 0
        assert hidden_dim % GROUP == 0
        self.scale_format = scale_format
        num_places = num_slots + num_spare
        self.gate_up = _empty_weight(num_places, 2 * hidden_dim, dim)
        self.down = _empty_weight(num_places, dim, hidden_dim)
        self.place_of_slot = torch.arange(num_slots, dtype=torch.int32)
        self._place_of_slot = list(range(num_slots))
        self._spare = _SparePlaces(range(num_slots, num_places))

    def own_places(self, num_slots: int, *, num_places: int, num_spare: int) -> None:
        """See `PhysicalSlots`."""
        _, hidden_rows, dim = self.gate_up.codes.shape
        with self.device:
            self.gate_up = _empty_weight(num_places + num_spare, hidden_rows, dim)
            self.down = _empty_weight(num_places + num_spare, dim, hidden_rows // 2)
        self._spare = _SparePlaces(range(num_places + num_spare))
        self._have_empty(num_slots)

    def share_places(self, owner: Self) -> None:
        """See `PhysicalSlots`."""
        self.gate_up, self.down, self._spare = owner.gate_up, owner.down, owner._spare
        self._have_empty(owner.num_slots)

    def _have_empty(self, num_slots: int) -> None:
        self.place_of_slot = self.place_of_slot.new_full((num_slots,), NO_PLACE)
        self._place_of_slot = [NO_PLACE] * num_slots

    def empty(self, slot: int) -> None:
        """Free the place of a slot; rows that no expert is chosen for are never computed."""
        self._spare.free(self._place_of_slot[slot])
        self._set_place(slot, NO_PLACE)

    def _set_place(self, slot: int, place: int) -> None:
        self._place_of_slot[slot] = place
        self.place_of_slot[slot] = place

    def _place(self, slot: int) -> int:
        """The place of a slot; an empty slot takes a spare one."""
        if self._place_of_slot[slot] == NO_PLACE:
            self._set_place(slot, self._spare.take_now())
        return self._place_of_slot[slot]

    @property
    def num_slots(self) -> int:
        """Physical slots of this rank in this layer."""
        return len(self._place_of_slot)

    @property
    def device(self) -> torch.device:
        """The device that holds the slots."""
        return self.place_of_slot.device

    def forward(self, x_ND: Tensor, rows_per_slot: Sequence[int]) -> Tensor:
        """Run rows in slot order through their slots' networks, [N, D]; N may be 0."""
        counts_S = torch.tensor(rows_per_slot, device=self.device)
        slots_N = torch.arange(self.num_slots, device=self.device).repeat_interleave(counts_S)
        ones_N1 = torch.ones(len(x_ND), 1, device=self.device)
        rows = group_quant(x_ND, scale_format=self.scale_format)
        return self.run(rows, slots_N.unsqueeze(1), ones_N1)

    def run(self, rows: QuantizedRows, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return each row's weighted sum over its slots, [T, D], without involving the host.

        Slots are this rank's own, int64; slot -1 adds nothing. Weights are float32.
        """
        order = self._order(slots_TK)
        placed = permute(rows, order)
        assert isinstance(placed, QuantizedRows)
        expected = -(-slots_TK.numel() // self.num_slots)
        y_MD = self.run_packed(placed, order.slot_ends_S, expected_rows=expected)
        return combine(y_MD, order, weights_TK)

    def run_packed(self, rows: QuantizedRows, slot_ends_S: Tensor, *, expected_rows: int) -> Tensor:
        """Run rows through their slots' networks, [M, D]; M is a multiple of the block size.

        Each slot's rows start at the start of a block and end at `slot_ends_S`, int32. Outputs of
        rows in between are unspecified. `expected_rows` of a slot select the kernels' tiles.
        """
        schedule = PrefixSumRows(group_ends=slot_ends_S, expected_rows=expected_rows)
        hidden_MH = grouped_gemm(rows, self.gate_up, self.place_of_slot, schedule=schedule)
        activated = self._activated(hidden_MH, slot_ends_S)
        return grouped_gemm(activated, self.down, self.place_of_slot, schedule=schedule)

    def run_padded(self, x_SMD: Tensor, rows_of_slot_S: Tensor, *, expected_rows: int) -> Tensor:
        """Run rows [S, M, D]; of slot s the first `rows_of_slot_S[s]`, int32, count: [S, M, D].

        Quantises them first. `expected_rows` of a slot select the kernels' tiles.
        """
        rows = group_quant(x_SMD, rows_per_group=rows_of_slot_S, scale_format=self.scale_format)
        schedule = MaskedRows(rows_of_group=rows_of_slot_S, expected_rows=expected_rows)
        hidden_SMH = grouped_gemm(rows, self.gate_up, self.place_of_slot, schedule=schedule)
        activated = silu_mul_quant(
            hidden_SMH, rows_per_group=rows_of_slot_S, scale_format=self.scale_format
        )
        return grouped_gemm(activated, self.down, self.place_of_slot, schedule=schedule)

    @torch.no_grad()
    def read(self, slot: int) -> Tensor:
        """Read the payload of one slot into a new uint8 tensor [expert_bytes] on the host."""
        parts = self._parts(self._place_of_slot[slot])
        return to_host([part.flatten().view(torch.uint8) for part in parts])

    @torch.no_grad()
    def write(self, slot: int, payload: Tensor) -> None:
        """Overwrite one slot with a payload.

        Raises:
            PayloadError: the payload does not have this model's expert size.
        """
        parts = self._decode(payload)
        self._fill(self._place(slot), parts)

    @torch.no_grad()
    def stage(self, payloads: Mapping[int, Tensor]) -> Settle:
        """Copy payloads by slot to spare places; settling changes the map.

        Raises:
            PayloadError: a payload does not have this model's expert size.
        """
        decoded = {slot: self._decode(payload) for slot, payload in payloads.items()}
        taken = self._spare.take(most=len(decoded))
        moved = dict(zip(decoded, taken.places, strict=False))
        for slot, place in moved.items():
            self._fill(place, decoded[slot])
        slots_M = torch.tensor(list(moved), dtype=torch.int64, device=self.device)
        places_M = torch.tensor(taken.places, dtype=torch.int32, device=self.device)
        copied = {
            slot: [part.to(self.device) for part in parts]
            for slot, parts in decoded.items()
            if slot not in moved
        }

        def settle(arrive: Arrive) -> None:
            arrive(slots_M, places_M, *(part for parts in copied.values() for part in parts))
            self.place_of_slot.index_copy_(0, slots_M, places_M)
            # The places that the slots leave become spare once nothing refers to this list.
            places = (self._place_of_slot[slot] for slot in moved)
            taken.places = [place for place in places if place != NO_PLACE]
            taken.is_left = True
            for slot, place in moved.items():
                self._place_of_slot[slot] = place
            for slot, parts in copied.items():
                self._fill(self._place(slot), parts)

        return settle

    def _order(self, slots_TK: Tensor) -> RowOrder:
        """Order rows by slot, in as many whole blocks as the worst routing needs."""
        num_rows = most_rows(slots_TK.numel(), num_slots=self.num_slots, alignment=_BLOCK)
        out = RowOrder(
            place_of_pair_TK=torch.empty_like(slots_TK, dtype=torch.int32),
            pair_of_row_M=slots_TK.new_empty(-(-num_rows // _BLOCK) * _BLOCK, dtype=torch.int32),
            slot_ends_S=slots_TK.new_empty(self.num_slots, dtype=torch.int32),
        )
        return order_rows(slots_TK, num_slots=self.num_slots, alignment=_BLOCK, out=out)

    def _activated(self, hidden_MH: Tensor, slot_ends_S: Tensor) -> QuantizedRows:
        """Apply SwiGLU's activation to real rows; in each block they come first."""
        starts_B = torch.arange(
            0, len(hidden_MH), _BLOCK, dtype=slot_ends_S.dtype, device=slot_ends_S.device
        )
        # A block belongs to the first slot that ends after its start; blocks of no slot end at 0.
        slots_B = torch.searchsorted(slot_ends_S, starts_B, right=True)
        ends_B = functional.pad(slot_ends_S, (0, 1))[slots_B]
        blocks = silu_mul_quant(
            hidden_MH.view(-1, _BLOCK, hidden_MH.shape[1]),
            rows_per_group=(ends_B - starts_B).clamp(0, _BLOCK),
            scale_format=self.scale_format,
        )
        return QuantizedRows(codes=blocks.codes.flatten(0, 1), scales=blocks.scales.flatten(0, 1))

    def _fill(self, place: int, parts: Sequence[Tensor]) -> None:
        for own, part in zip(self._parts(place), parts, strict=True):
            own.copy_(part)

    def _parts(self, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The weights at a place, in a payload's order."""
        gate_up, down = self.gate_up, self.down
        return gate_up.codes[place], down.codes[place], gate_up.scales[place], down.scales[place]

    def _decode(self, payload: Tensor) -> list[Tensor]:
        """Split a payload into views of its parts."""
        own = self._parts(0)
        ends = [0]
        for part in own:
            ends.append(ends[-1] + math.prod(part.shape) * part.element_size())
        check_payload(payload, ends[-1])
        whole = payload.contiguous()
        return [
            whole[begin:end].view(part.dtype).view(part.shape)
            for part, (begin, end) in zip(own, pairwise(ends), strict=True)
        ]


class _TakenPlaces:
    """Spare places in use; they become spare again when this object is garbage-collected.

    The lifetime matters because ranks may still switch to a generation that was aborted: the engine
    refers to it until they agree, and until then no other staging may write to its places.
    """

    def __init__(self, spare: deque[int], *, most: int) -> None:
        self.places: list[int] = []
        self.is_left = False
        """Whether the places are those that slots left at a switch."""
        self._spare = spare
        while len(self.places) < most:
            try:
                self.places.append(spare.popleft())
            except IndexError:
                return

    def __del__(self) -> None:
        self._spare.extend(self.places)


class _SparePlaces:
    """Places that no slot has, of one layer or of several."""

    def __init__(self, places: Iterable[int]) -> None:
        # Its methods are atomic: staging takes places on threads other than the engine's.
        self._spare = deque(places)
        self._taken = WeakSet[_TakenPlaces]()

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._spare))

    def __len__(self) -> int:
        return len(self._spare)

    def take(self, *, most: int) -> _TakenPlaces:
        """Take up to `most` places for staged experts, on any thread."""
        taken = _TakenPlaces(self._spare, most=most)
        self._taken.add(taken)
        return taken

    def free(self, place: int) -> None:
        """A slot has left a place."""
        self._spare.append(place)

    def take_now(self) -> int:
        """Take a place at a switch, on the engine's thread.

        Its copies follow all steps that read what a slot has just left, so those places will do.
        """
        try:
            return self._spare.popleft()
        except IndexError:
            left = next(one for one in self._taken if one.is_left and one.places)
            return left.places.pop()


def _empty_weight(*shape: int) -> QuantizedWeight:
    return QuantizedWeight(
        codes=torch.empty(shape, dtype=CODE), scales=torch.empty(weight_scale_shape(shape))
    )

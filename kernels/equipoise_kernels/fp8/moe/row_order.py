"""Rows in the order of their slots: a map made on the device, the same in every run.

Contract: slots int64 [T, K], contiguous; T may be 0. Pair n = t * K + k is row t's choice k; it has
no place if its slot is not in [0, num_slots) (padding, or another rank's). The others get rows of a
buffer: slot by slot, pairs of one slot in their original order, each slot's first row at a multiple
of `alignment`. The buffer has room for the worst case, so no routing overflows it.

A slot's program reads all pairs twice: once to count, once to assign places after those of earlier
slots. It uses no atomics, so the result does not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.jit import jit, next_power_of_two, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

_MAX_ROWS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrderConfig:
    """Work of a program."""

    pairs: int
    """Pairs that a program reads at a time."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    RowOrderConfig(pairs=pairs, num_warps=num_warps)
    for pairs in (512, 1024, 2048)
    for num_warps in (4, 8)
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOrder:
    """Where assignments (token-expert pairs, `pair` in names) are in a buffer of M rows.

    Raises:
        KernelInputError: the tensors do not match.
    """

    place_of_pair_TK: Tensor
    """Row of the buffer, int32; -1 for a pair without a place."""
    pair_of_row_M: Tensor
    """Pair of each row, int32; -1 for a padding row."""
    slot_ends_S: Tensor
    """Where each slot's rows end, int32; the groups of `gemm.schedule.PrefixSumRows`."""

    def __post_init__(self) -> None:
        for name, tensor, rank in (
            ("place_of_pair", self.place_of_pair_TK, 2),
            ("pair_of_row", self.pair_of_row_M, 1),
            ("slot_ends", self.slot_ends_S, 1),
        ):
            require(name, tensor, torch.int32, contiguous=True, like=self.place_of_pair_TK)
            if tensor.dim() != rank:
                raise KernelInputError(
                    f"{name} must have {rank} dimensions, not {list(tensor.shape)}"
                )


def most_rows(num_pairs: int, *, num_slots: int, alignment: int) -> int:
    """Rows of a buffer that fits every routing."""
    return num_pairs + min(num_pairs, num_slots) * (alignment - 1)


def order_rows(
    slots_TK: Tensor, *, num_slots: int, alignment: int = 1, out: RowOrder | None = None
) -> RowOrder:
    """Order pairs by the backend that was selected for this process.

    Args:
        slots_TK: slot of every choice of every row.
        num_slots: slots that rows may be for.
        alignment: of each slot's first row.
        out: where to write; new tensors by default.

    Raises:
        KernelInputError: the contract is broken, or `out` has fewer rows than `most_rows`.
    """
    require("slots", slots_TK, torch.int64)
    if slots_TK.dim() != 2 or slots_TK.shape[1] == 0:
        raise KernelInputError(f"slots must be [T, K], not {list(slots_TK.shape)}")
    require("slots", slots_TK, contiguous=True)
    if num_slots < 1 or alignment < 1:
        raise KernelInputError(f"need slots and an alignment, not {num_slots} and {alignment}")
    num_rows = most_rows(slots_TK.numel(), num_slots=num_slots, alignment=alignment)
    if num_rows > _MAX_ROWS:
        raise KernelInputError(f"{num_rows} rows are more than int32 can index: split the rows")
    out = out or _empty(slots_TK, num_slots=num_slots, num_rows=num_rows)
    require("place_of_pair", out.place_of_pair_TK, shape=slots_TK.shape, like=slots_TK)
    require("slot_ends", out.slot_ends_S, shape=(num_slots,))
    if len(out.pair_of_row_M) < num_rows:
        raise KernelInputError(
            f"pair_of_row has {len(out.pair_of_row_M)} rows, {num_rows} may be needed: "
            "size it by most_rows()"
        )
    ROW_ORDER.on(slots_TK.device)(slots_TK, alignment=alignment, out=out)
    return out


def row_order_reference(slots_TK: Tensor, *, alignment: int, out: RowOrder) -> None:
    """The torch twin."""
    num_slots = len(out.slot_ends_S)
    slots_N = slots_TK.flatten()
    slots_N = slots_N.where((slots_N >= 0) & (slots_N < num_slots), num_slots)
    counts_S = torch.bincount(slots_N, minlength=num_slots + 1)[:num_slots]
    room_S = (counts_S + alignment - 1) // alignment * alignment
    starts_S = room_S.cumsum(0) - room_S
    pairs_N = slots_N.argsort(stable=True)[: int(counts_S.sum())]
    sorted_N = slots_N[pairs_N]
    first_S = counts_S.cumsum(0) - counts_S
    places_N = (starts_S - first_S)[sorted_N] + torch.arange(len(pairs_N), device=slots_N.device)
    out.slot_ends_S.copy_(starts_S + counts_S)
    out.pair_of_row_M.fill_(-1)
    out.pair_of_row_M[places_N] = pairs_N.to(torch.int32)
    out.place_of_pair_TK.fill_(-1)
    out.place_of_pair_TK.view(-1)[pairs_N] = places_N.to(torch.int32)


def row_order_triton(
    slots_TK: Tensor, *, alignment: int, out: RowOrder, config: RowOrderConfig | None = None
) -> None:
    """Launch both kernels, with the committed configuration of this device by default."""
    num_slots, num_pairs = len(out.slot_ends_S), slots_TK.numel()
    config = config or ROW_ORDER.config(rows=num_pairs)
    counts_S = torch.empty_like(out.slot_ends_S)
    options = configurations.options(config)
    row_count_kernel[(num_slots,)](slots_TK, counts_S, num_pairs, **options)
    row_order_kernel[(num_slots + 1,)](
        slots_TK,
        counts_S,
        out.place_of_pair_TK,
        out.pair_of_row_M,
        out.slot_ends_S,
        num_pairs,
        num_slots,
        len(out.pair_of_row_M),
        alignment,
        PADDED_SLOTS=next_power_of_two(num_slots),
        **options,
    )


@jit
def row_count_kernel(
    slots_ptr: tl.tensor, counts_ptr: tl.tensor, num_pairs: int, PAIRS: tl.constexpr
) -> None:
    """Each program counts the pairs of one slot."""
    slot = tl.program_id(0)
    hits = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        hits += (tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=-1) == slot).to(tl.int32)
    tl.store(counts_ptr + slot, tl.sum(hits, axis=0))


@jit
def row_order_kernel(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    places_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_pairs: int,
    num_slots: int,
    num_rows: int,
    alignment: int,
    PADDED_SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Each program orders one slot; the last also handles unplaced pairs and trailing rows."""
    slot = tl.program_id(0)
    others = tl.arange(0, PADDED_SLOTS)
    counts = tl.load(counts_ptr + others, mask=others < slot, other=0)
    room = (counts + alignment - 1) // alignment * alignment
    start = tl.sum(room, axis=0)
    place = start
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        inside = pairs < num_pairs
        slots = tl.load(slots_ptr + pairs, mask=inside, other=-1)
        nobodys = (slots < 0) | (slots >= num_slots)
        is_own = tl.where(slot == num_slots, nobodys, slots == slot) & inside
        hits = is_own.to(tl.int32)
        places = place + tl.cumsum(hits, axis=0) - hits
        tl.store(places_ptr + pairs, tl.where(nobodys, -1, places), mask=is_own)
        tl.store(pairs_ptr + places, pairs, mask=is_own & (places < num_rows) & (slot < num_slots))
        place += tl.sum(hits, axis=0)
    end = tl.where(slot == num_slots, start, place)
    tl.store(ends_ptr + slot, end, mask=slot < num_slots)
    behind = (end + alignment - 1) // alignment * alignment
    stop = tl.where(slot == num_slots, num_rows, behind)
    for first in range(end, stop, PAIRS):
        rows = first + tl.arange(0, PAIRS)
        tl.store(
            pairs_ptr + rows, tl.full([PAIRS], -1, tl.int32), mask=rows < tl.minimum(stop, num_rows)
        )


def specializations(config: RowOrderConfig, *, num_slots: int) -> list[Specialization]:
    """Specialisations of a configuration: both kernels."""
    return [
        Specialization(
            kernel=row_count_kernel,
            name=f"row_count {config}",
            types={"slots_ptr": "*i64", "counts_ptr": "*i32"},
            options=configurations.options(config),
        ),
        Specialization(
            kernel=row_order_kernel,
            name=f"row_order {config} slots={num_slots}",
            types={"slots_ptr": "*i64", "counts_ptr places_ptr pairs_ptr ends_ptr": "*i32"},
            options=configurations.options(config) | {"PADDED_SLOTS": next_power_of_two(num_slots)},
        ),
    ]


def _empty(slots_TK: Tensor, *, num_slots: int, num_rows: int) -> RowOrder:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=slots_TK.device)

    return RowOrder(
        place_of_pair_TK=integers(*slots_TK.shape),
        pair_of_row_M=integers(num_rows),
        slot_ends_S=integers(num_slots),
    )


ROW_ORDER = KernelOperation(
    name="row_order",
    backends={"reference": row_order_reference, "triton": row_order_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

"""Grouped product of block-scaled FP8 rows and the weights of physical slots: the core of MoE.

Every group of rows (an expert's tokens on this rank) is multiplied by the weights of one slot:
D[row] = A[row] W[slot_of_group[group of row]]^T. Weights are in a slab [S, N, K]; the slot map is a
small int32 tensor in device memory, read by the kernel. A layout switch fills spare slots and
changes the map, and captured CUDA graphs stay valid.

Contract: W [S, N, K] contiguous, K a multiple of 128, N any; A's codes and scales as in `formats`;
D bfloat16 or float32. The arithmetic is that of `gemm.dense` without split K. One of three
schedules assigns rows to groups, always with int32 tensors on the device, so that the host does not
wait:

ContiguousRows: A [R, K] and `group_of_row` [R]. Groups start at multiples of 128 rows; in each 128
    rows the group's own come first, then padding, marked -1.
PrefixSumRows: A [R, K] and `group_ends` [G]. Group g has the rows from the end of group g - 1,
    rounded up to 128, to group_ends[g].
MaskedRows: A [G, M, K] and `rows_of_group` [G]. Group g has its first rows_of_group[g] rows.

Groups may be empty. Rows of no group are never read, and their outputs never written. Errors that
could only be rejected by waiting for the device are masked instead: the rows of a group whose id is
not in [0, G) or whose slot is not in [0, S) belong to no group; in a block of 128, neither do rows
whose id differs from the first row's; counts are clamped to [0, M], ends to [0, R].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import GROUP, QuantizedRows, QuantizedWeight, require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.gemm.dense import gemm_reference
from equipoise_kernels.fp8.gemm.schedule import (
    GROUP_ALIGNMENT,
    ContiguousRows,
    MaskedRows,
    PrefixSumRows,
    Schedule,
    row_tiles,
    rows_by_group,
    tile_rows,
)
from equipoise_kernels.fp8.gemm.tile import (
    OUTPUT_DTYPES,
    check_operands,
    multiply_tile,
    weight_descriptor,
)
from equipoise_kernels.fp8.jit import constant, jit, next_power_of_two, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

_GROUP = constant(GROUP)
# Enough for each program to walk several tiles when the interpreter stands in for a device.
_PROGRAMS_ON_CPU = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmConfig:
    """A tile, and how many programs walk through all tiles."""

    block_m: int
    """Rows of a tile, a divisor of 128; at least 64, or at least 16 with `swap_ab`."""
    block_n: int
    """Outputs of a tile; 64 or 128."""
    swap_ab: bool
    """Whether weights take the tensor cores' rows."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Blocks of K in flight."""
    ctas_per_sm: int
    """Programs per multiprocessor."""


CONFIG_SPACE = (
    *(
        GroupedGemmConfig(
            block_m=block_m,
            block_n=block_n,
            swap_ab=True,
            num_warps=4,
            num_stages=num_stages,
            ctas_per_sm=ctas_per_sm,
        )
        for block_m, block_n, num_stages, ctas_per_sm in product(
            (16, 32, 64), (64, 128), (3, 4, 5), (2, 3)
        )
    ),
    *(
        GroupedGemmConfig(
            block_m=block_m,
            block_n=128,
            swap_ab=False,
            num_warps=block_m // 16,
            num_stages=num_stages,
            ctas_per_sm=ctas_per_sm,
        )
        for block_m, num_stages, ctas_per_sm in product((64, 128), (3, 4), (1, 2, 3))
    ),
)


def grouped_gemm(
    a: QuantizedRows,
    weight: QuantizedWeight,
    slot_of_group: Tensor,
    *,
    schedule: Schedule,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply groups of rows with their slots' weights, with this process's backend.

    Args:
        a: rows [R, K], or [G, M, K] with MaskedRows.
        weight: the slab [S, N, K].
        slot_of_group: int32 [G].
        schedule: which rows belong to which group.
        dtype: of a new output, bfloat16 or float32; ignored with `out`.
        out: where to write, [R, N] or [G, M, N]; allocated by default, uninitialised where no group
            has a row.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    if weight.codes.dim() != 3:
        raise KernelInputError(f"weights must be [S, N, K], not {list(weight.codes.shape)}")
    check_operands(a, weight)
    require(
        "slot_of_group", slot_of_group, torch.int32, shape=(slot_of_group.numel(),), like=a.codes
    )
    schedule.check(a, num_groups=slot_of_group.numel())
    shape = (*a.codes.shape[:-1], weight.codes.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.codes.device)
    require("out", out, *OUTPUT_DTYPES, shape=shape, dense=True, like=a.codes)
    if out.numel() > 0 and slot_of_group.numel() > 0:
        GROUPED_GEMM.on(out.device)(
            a, weight, slot_of_group.contiguous(), schedule=schedule, out=out
        )
    return out


def grouped_gemm_reference(
    a: QuantizedRows,
    weight: QuantizedWeight,
    slot_of_group: Tensor,
    *,
    schedule: Schedule,
    out: Tensor,
) -> None:
    """The torch twin: a loop over groups."""
    slots = slot_of_group.tolist()
    for group, rows in rows_by_group(schedule, num_rows=out.shape[0], num_groups=len(slots)):
        if not 0 <= slots[group] < weight.codes.shape[0]:
            continue
        result = out.new_empty(out[rows].shape)
        gemm_reference(
            QuantizedRows(codes=a.codes[rows], scales=a.scales[rows]),
            QuantizedWeight(codes=weight.codes[slots[group]], scales=weight.scales[slots[group]]),
            out=result,
        )
        out[rows] = result


def grouped_gemm_triton(
    a: QuantizedRows,
    weight: QuantizedWeight,
    slot_of_group: Tensor,
    *,
    schedule: Schedule,
    out: Tensor,
    config: GroupedGemmConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    *outer, num_rows, num_columns = out.shape
    num_groups = slot_of_group.numel()
    config = config or GROUPED_GEMM.config(
        rows=schedule.expected_rows_per_group(num_rows, num_groups=num_groups),
        shape=(num_columns, a.codes.shape[-1]),
    )
    assert GROUP_ALIGNMENT % config.block_m == 0, config
    grouped_gemm_kernel[(_num_programs(out.device, config.ctas_per_sm),)](
        a.codes,
        a.scales,
        weight_descriptor(weight, block_n=config.block_n),
        weight.scales,
        out,
        slot_of_group,
        schedule.groups,
        num_rows,
        num_columns,
        a.scales.shape[-1],
        num_groups,
        weight.codes.shape[0],
        a.codes.stride(0) if outer else 0,
        a.codes.stride(-2),
        a.scales.stride(0) if outer else 0,
        *a.scales.stride()[-2:],
        out.stride(0) if outer else 0,
        out.stride(-2),
        SCHEDULE=schedule.number,
        PADDED_GROUPS=next_power_of_two(num_groups),
        **configurations.options(config),
    )


@cache
def _num_programs(device: torch.device, ctas_per_sm: int) -> int:
    if device.type == "cpu":
        return _PROGRAMS_ON_CPU
    return ctas_per_sm * int(torch.cuda.get_device_properties(device).multi_processor_count)


@jit
def grouped_gemm_kernel(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    weight: tl.tensor,
    weight_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slot_of_group_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    num_blocks: int,
    num_groups: int,
    num_slots: int,
    a_outer_stride: int,
    a_stride: int,
    a_scale_outer_stride: int,
    a_scale_row_stride: int,
    a_scale_block_stride: int,
    out_outer_stride: int,
    out_stride: int,
    SCHEDULE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP_AB: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Each program walks through tiles, all column tiles of a row tile before the next.

    A tile without rows has no blocks of K: there is one path through the body.
    """
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    num_row_tiles, tiles_before = row_tiles(
        groups_ptr, num_rows, num_groups, SCHEDULE, PADDED_GROUPS, BLOCK_M
    )
    for tile in range(tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0)):
        group, rows, is_row = tile_rows(
            groups_ptr,
            tile // num_column_tiles,
            tiles_before,
            num_rows,
            num_groups,
            SCHEDULE,
            PADDED_GROUPS,
            BLOCK_M,
        )
        slot, outer, is_row = _slot_of_tile(slot_of_group_ptr, group, is_row, num_groups, num_slots)
        first_column = (tile % num_column_tiles) * BLOCK_N
        scale_row = tl.maximum(slot, 0).to(tl.int64) * tl.cdiv(num_columns, _GROUP)
        multiply_tile(
            a_ptr + outer * a_outer_stride,
            a_scale_ptr + outer * a_scale_outer_stride,
            weight,
            weight_scale_ptr + (scale_row + first_column // _GROUP) * num_blocks,
            out_ptr + outer * out_outer_stride,
            rows,
            is_row,
            slot,
            first_column,
            num_columns,
            0,
            tl.where(slot >= 0, num_blocks, 0),
            a_stride,
            a_scale_row_stride,
            a_scale_block_stride,
            out_stride,
            BLOCK_M,
            BLOCK_N,
            SWAP_AB,
            NUM_STAGES,
        )


@jit
def _slot_of_tile(
    slot_of_group_ptr: tl.tensor,
    group: tl.tensor,
    is_row: tl.tensor,
    num_groups: int,
    num_slots: int,
) -> Any:
    """A group's slot (-1 for none), its int64 number, and which of its tile's rows are real.

    The number is 0 for no group. In the two flat schedules it does not matter: outer strides are 0.
    """
    is_group = (group >= 0) & (group < num_groups)
    slot = tl.load(slot_of_group_ptr + group, mask=is_group, other=-1)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, -1)
    # Compares blocks, because interpreters differ on a block masked by a scalar.
    return slot, tl.where(is_group, group, 0).to(tl.int64), tl.where(is_row, slot, -1) >= 0


def specializations(config: GroupedGemmConfig, *, num_groups: int) -> list[Specialization]:
    """Specialisations of a configuration: the three schedules."""
    return [
        Specialization(
            kernel=grouped_gemm_kernel,
            name=f"grouped_gemm {schedule.__name__} {config}",
            types={
                "a_ptr": "*fp8e4nv",
                "a_scale_ptr weight_scale_ptr": "*fp32",
                "weight": f"tensordesc<fp8e4nv[1,{config.block_n},{GROUP}]>",
                "out_ptr": "*bf16",
                "slot_of_group_ptr groups_ptr": "*i32",
            },
            multiples_of_16="num_columns a_outer_stride a_stride out_outer_stride out_stride",
            options=configurations.options(config)
            | {"SCHEDULE": schedule.number, "PADDED_GROUPS": next_power_of_two(num_groups)},
            ctas_per_sm=config.ctas_per_sm,
            is_product=True,
            min_accumulators=config.block_m * config.block_n // (32 * config.num_warps),
        )
        for schedule in (ContiguousRows, PrefixSumRows, MaskedRows)
    ]


GROUPED_GEMM = KernelOperation(
    name="grouped_gemm",
    backends={"reference": grouped_gemm_reference, "triton": grouped_gemm_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

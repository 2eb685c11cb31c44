"""Dense product of block-scaled FP8 rows and weights: D = A W^T.

Contract: A [M, K] with scales in either layout; W [N, K] contiguous; K a multiple of 128, N any, M
may be 0. D [M, N] is bfloat16 or float32 with contiguous columns. Each 128 of K is summed
separately, multiplied by both scales, and added to a float32 sum in the order of K. With split K
there is such a sum for every part, and the parts are added in order: bits depend on the
configuration, never on timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import GROUP, QuantizedRows, QuantizedWeight, require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.gemm import libraries
from equipoise_kernels.fp8.gemm.tile import (
    OUTPUT_DTYPES,
    check_operands,
    multiply_tile,
    weight_descriptor,
)
from equipoise_kernels.fp8.jit import constant, jit, tl, triton_version
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

# From here on, libraries are faster: on Hopper, stock Triton reaches a third to a half of them.
LARGE_ROWS = 256

_GROUP = constant(GROUP)
_SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """A tile, and how tiles are spread over the device."""

    block_m: int
    """Rows of a tile; at least 64, or at least 16 with `swap_ab`."""
    block_n: int
    """Outputs of a tile; 64 or 128."""
    swap_ab: bool
    """Whether weights take the tensor cores' rows."""
    split_k: int
    """Parts of K, each computed by separate programs."""
    group_m: int
    """Row tiles that traverse the outputs together, for the L2 cache."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Blocks of K in flight."""
    ctas_per_sm: int
    """Programs that must fit on one multiprocessor."""


CONFIG_SPACE = (
    *(
        GemmConfig(
            block_m=block_m,
            block_n=block_n,
            swap_ab=True,
            split_k=split_k,
            group_m=1,
            num_warps=4,
            num_stages=num_stages,
            ctas_per_sm=1,
        )
        for block_m, block_n, split_k, num_stages in product(
            (16, 32, 64), (64, 128), (1, 2, 4, 8), (3, 4, 5)
        )
    ),
    *(
        GemmConfig(
            block_m=block_m,
            block_n=128,
            swap_ab=False,
            split_k=split_k,
            group_m=group_m,
            num_warps=block_m // 16,
            num_stages=num_stages,
            ctas_per_sm=1,
        )
        for block_m, split_k, group_m, num_stages in product(
            (64, 128), (1, 2, 4), (1, 4, 8), (3, 4)
        )
    ),
)


def gemm(
    a: QuantizedRows,
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply rows [M, K] with weights [N, K], with this process's backend: [M, N].

    Args:
        a: rows.
        weight: weights.
        dtype: of a new output, bfloat16 or float32; ignored with `out`.
        out: where to write; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    if a.codes.dim() != 2 or weight.codes.dim() != 2:
        raise KernelInputError("gemm takes rows [M, K] and weights [N, K]; see grouped_gemm")
    check_operands(a, weight)
    shape = (a.codes.shape[0], weight.codes.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.codes.device)
    require("out", out, *OUTPUT_DTYPES, shape=shape, dense=True, like=a.codes)
    operation = GEMM_LARGE if shape[0] >= LARGE_ROWS else GEMM
    operation.on(out.device)(a, weight, out=out)
    return out


def gemm_reference(a: QuantizedRows, weight: QuantizedWeight, *, out: Tensor) -> None:
    """The torch twin: a float32 product per 128 of K, scaled and added in order."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    weight_scales = weight.scales.repeat_interleave(GROUP, dim=0)[: out.shape[1]]
    for block in range(a.scales.shape[1]):
        columns = slice(block * GROUP, (block + 1) * GROUP)
        part = a.codes[:, columns].float() @ weight.codes[:, columns].float().T
        total += part * (a.scales[:, block, None] * weight_scales[None, :, block])
    out.copy_(total)


def gemm_triton(
    a: QuantizedRows,
    weight: QuantizedWeight,
    *,
    out: Tensor,
    config: GemmConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_rows, num_columns = out.shape
    if num_rows == 0:
        return
    num_blocks = a.scales.shape[1]
    config = config or GEMM.config(rows=num_rows, shape=(num_columns, num_blocks * GROUP))
    parts = out
    if config.split_k > 1:
        parts = out.new_empty((config.split_k, num_rows, num_columns), dtype=torch.float32)
    num_tiles = -(-num_rows // config.block_m) * -(-num_columns // config.block_n)
    gemm_kernel[(num_tiles, config.split_k)](
        a.codes,
        a.scales,
        weight_descriptor(weight, block_n=config.block_n),
        weight.scales,
        parts,
        num_rows,
        num_columns,
        num_blocks,
        a.codes.stride(0),
        *a.scales.stride(),
        parts.stride(-2),
        parts.stride(0) if config.split_k > 1 else 0,
        **configurations.options(config),
    )
    if config.split_k > 1:
        add_parts_kernel[(num_rows, -(-num_columns // _SUM_BLOCK))](
            parts,
            out,
            num_rows,
            num_columns,
            out.stride(0),
            SPLIT_K=config.split_k,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
        )


def _gemm_scaled_mm(a: QuantizedRows, weight: QuantizedWeight, *, out: Tensor) -> None:
    """Multiply with cuBLAS, and the rows that it does not take with this package's own kernel."""
    num_rows = out.shape[0]
    whole = num_rows - num_rows % libraries.SCALED_MM_ROWS
    if out.shape[1] % libraries.SCALED_MM_COLUMNS != 0:
        whole = 0
    if whole > 0:
        rows = QuantizedRows(codes=a.codes[:whole], scales=a.scales[:whole])
        libraries.gemm_scaled_mm(rows, weight, out=out[:whole])
    if whole < num_rows:
        rows = QuantizedRows(codes=a.codes[whole:], scales=a.scales[whole:])
        run = gemm_reference if triton_version() is None else gemm_triton
        run(rows, weight, out=out[whole:])


@jit
def gemm_kernel(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    weight: tl.tensor,
    weight_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    num_blocks: int,
    a_stride: int,
    a_scale_row_stride: int,
    a_scale_block_stride: int,
    out_stride: int,
    part_stride: int,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP_AB: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Each program computes one tile of one part of K."""
    row_tile, column_tile = _tile_of_program(num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    part = tl.program_id(1)
    rows = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    first_column = column_tile * BLOCK_N
    blocks_per_part = tl.cdiv(num_blocks, SPLIT_K)
    multiply_tile(
        a_ptr,
        a_scale_ptr,
        weight,
        weight_scale_ptr + (first_column // _GROUP) * num_blocks,
        out_ptr + part.to(tl.int64) * part_stride,
        rows,
        is_row,
        0,
        first_column,
        num_columns,
        part * blocks_per_part,
        tl.minimum((part + 1) * blocks_per_part, num_blocks),
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
def _tile_of_program(
    num_rows: int,
    num_columns: int,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> Any:
    """Row and column tile: GROUP_M row tiles by all columns, then the next GROUP_M."""
    num_row_tiles, num_column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    tiles_per_group = GROUP_M * num_column_tiles
    first_row_tile = (tl.program_id(0) // tiles_per_group) * GROUP_M
    group_height = tl.minimum(num_row_tiles - first_row_tile, GROUP_M)
    place = tl.program_id(0) % tiles_per_group
    return first_row_tile + place % group_height, place // group_height


@jit
def add_parts_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    out_stride: int,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add contiguous float32 parts [SPLIT_K, M, N] in order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT_K):
        part_ptr = parts_ptr + (part * num_rows + row) * num_columns
        total += tl.load(part_ptr + columns, mask=columns < num_columns, other=0.0)
    values = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, values, mask=columns < num_columns)


def specializations(config: GemmConfig) -> list[Specialization]:
    """Specialisations of a configuration."""
    dtype = "fp32" if config.split_k > 1 else "bf16"
    kernels = [
        Specialization(
            kernel=gemm_kernel,
            name=f"gemm {config}",
            types={
                "a_ptr": "*fp8e4nv",
                "a_scale_ptr weight_scale_ptr": "*fp32",
                "weight": f"tensordesc<fp8e4nv[1,{config.block_n},{GROUP}]>",
                "out_ptr": f"*{dtype}",
            },
            multiples_of_16="num_columns a_stride out_stride part_stride",
            options=configurations.options(config),
            ctas_per_sm=config.ctas_per_sm,
            is_product=True,
            min_accumulators=config.block_m * config.block_n // (32 * config.num_warps),
        )
    ]
    if config.split_k > 1:
        kernels.append(
            Specialization(
                kernel=add_parts_kernel,
                name=f"add_parts split_k={config.split_k}",
                types={"parts_ptr": "*fp32", "out_ptr": "*bf16"},
                multiples_of_16="num_columns out_stride",
                options={"SPLIT_K": config.split_k, "BLOCK": _SUM_BLOCK, "num_warps": 4},
            )
        )
    return kernels


GEMM = KernelOperation(
    name="gemm",
    backends={
        "reference": gemm_reference,
        "triton": gemm_triton,
        "scaled_mm": _gemm_scaled_mm,
        "deep_gemm": libraries.gemm_deep_gemm,
    },
    configs=CONFIG_SPACE,
    specializations=specializations,
)
GEMM_LARGE = replace(GEMM, name="gemm_large")
"""The same, where libraries are faster; configurations are those of `gemm`."""

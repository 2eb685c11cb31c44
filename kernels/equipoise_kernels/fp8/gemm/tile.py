"""The K loop that every block-scaled FP8 product shares; codes are multiplied nowhere else.

A tile is BLOCK_M rows by BLOCK_N weight rows (outputs). Tensor cores keep only about 14 bits of a
sum of FP8 products, so each 128 of K is a separate product, scaled and added to a float32 sum
outside of them: the promotion of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), at the interval at
which scales change anyway.

BLOCK_N divides 128, so that a tile has one weight scale per 128 of K.

With few rows the operands are swapped: the weights fill the tensor cores' 64 rows, and the rows of
the tile, as few as 16, their columns.
"""

from __future__ import annotations

from typing import Any

import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import GROUP, QuantizedRows, QuantizedWeight, require
from equipoise_kernels.fp8.jit import TensorDescriptor, constant, jit, tl

OUTPUT_DTYPES = (torch.bfloat16, torch.float32)

_GROUP = constant(GROUP)


@jit
def multiply_tile(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    weight: tl.tensor,
    weight_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    slot: tl.tensor,
    first_column: tl.tensor,
    num_columns: int,
    first_block: tl.tensor,
    end_block: tl.tensor,
    a_stride: int,
    a_scale_row_stride: int,
    a_scale_block_stride: int,
    out_stride: int,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP_AB: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Compute one tile over blocks of K, and write its rows and its columns below `num_columns`.

    `rows` are int64 row numbers; only those with `is_row` are read and written. `weight` is a
    tensor descriptor of codes [S, N, K] with blocks [1, BLOCK_N, 128]; `weight_scale_ptr` points at
    the scales of the tile's weight rows.
    """
    total = _block_scaled_product(
        a_ptr + rows * a_stride,
        a_scale_ptr + rows * a_scale_row_stride,
        is_row,
        weight,
        weight_scale_ptr,
        slot,
        first_column,
        first_block,
        end_block,
        a_scale_block_stride,
        BLOCK_M,
        BLOCK_N,
        SWAP_AB,
        NUM_STAGES,
    )
    _store_tile(
        out_ptr, total, rows, is_row, first_column, num_columns, out_stride, BLOCK_N, SWAP_AB
    )


@jit
def _block_scaled_product(
    row_ptrs: tl.tensor,
    row_scale_ptrs: tl.tensor,
    is_row: tl.tensor,
    weight: tl.tensor,
    weight_scale_ptr: tl.tensor,
    slot: tl.tensor,
    first_column: tl.tensor,
    first_block: tl.tensor,
    end_block: tl.tensor,
    a_scale_block_stride: int,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP_AB: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> Any:
    """Sum over blocks of K, float32 [BLOCK_M, BLOCK_N], or its transpose with SWAP_AB."""
    a_ptrs = row_ptrs[:, None] + tl.arange(0, _GROUP)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    # Triton prefetches scales too only in a loop with its own number of stages. Otherwise every
    # product waits for them.
    for block in tl.range(first_block, end_block, num_stages=NUM_STAGES):
        a = tl.load(a_ptrs + block * _GROUP, mask=is_row[:, None], other=0.0)
        w = weight.load([slot, first_column, block * _GROUP]).reshape(BLOCK_N, _GROUP)
        a_scales = tl.load(row_scale_ptrs + block * a_scale_block_stride, mask=is_row, other=0.0)
        scales = a_scales * tl.load(weight_scale_ptr + block)
        if SWAP_AB:
            total += tl.dot(w, tl.trans(a)) * scales[None, :]
        else:
            total += tl.dot(a, tl.trans(w)) * scales[:, None]
    return total


@jit
def _store_tile(
    out_ptr: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first_column: tl.tensor,
    num_columns: int,
    out_stride: int,
    BLOCK_N: tl.constexpr,
    SWAP_AB: tl.constexpr,
) -> None:
    """Round a tile to the output's dtype and write its rows, and columns below `num_columns`."""
    columns = first_column + tl.arange(0, BLOCK_N)
    values = total.to(out_ptr.dtype.element_ty)
    if SWAP_AB:
        places = rows[None, :] * out_stride + columns[:, None]
        tl.store(out_ptr + places, values, mask=is_row[None, :] & (columns < num_columns)[:, None])
    else:
        places = rows[:, None] * out_stride + columns[None, :]
        tl.store(out_ptr + places, values, mask=is_row[:, None] & (columns < num_columns)[None, :])


def weight_descriptor(weight: QuantizedWeight, *, block_n: int) -> Any:
    """The tensor descriptor for loading weights: codes [S, N, K], or [N, K] as one slot.

    Kept with the weight, because making it takes a third of a launch.
    """
    name = f"descriptor {block_n}"
    if name not in weight.derived:
        codes = weight.codes if weight.codes.dim() == 3 else weight.codes.unsqueeze(0)
        block = [1, block_n, GROUP]
        weight.derived[name] = TensorDescriptor(
            codes, list(codes.shape), list(codes.stride()), block
        )
    return weight.derived[name]


def check_operands(a: QuantizedRows, weight: QuantizedWeight) -> None:
    """Raise KernelInputError unless the kernels can multiply these rows and weights."""
    if a.codes.shape[-1] != weight.codes.shape[-1]:
        raise KernelInputError(
            f"rows have K = {a.codes.shape[-1]}, weights {weight.codes.shape[-1]}: they must agree"
        )
    require("rows", a.codes, dense=True)
    if not weight.codes.is_contiguous() or not weight.scales.is_contiguous():
        raise KernelInputError("weights and their scales must be contiguous: call contiguous()")
    if weight.codes.data_ptr() % 16 or a.codes.data_ptr() % 16 or a.codes.stride(-2) % 16:
        raise KernelInputError(
            "codes must start at multiples of 16 bytes, and so must each row: copy them"
        )
    device = a.codes.device
    if not (a.scales.device == weight.codes.device == weight.scales.device == device):
        devices = {t.device for t in (a.codes, a.scales, weight.codes, weight.scales)}
        raise KernelInputError(f"rows and weights are on several devices ({devices}): move them")

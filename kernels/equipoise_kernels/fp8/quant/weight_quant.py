"""Quantises weights in blocks of 128 x 128, and back.

Contract: weights [N, K] or [S, N, K], bfloat16, float16 or float32, any strides of whole rows; N
and K at least 1: the last blocks of a dimension may be smaller. Scales are multipliers
(checkpoints' `weight_scale_inv`), float32 [.., ceil(N / 128), ceil(K / 128)]. The arithmetic is
that of `formats`. Back: code * scale in float32, rounded to the requested dtype.

Used when weights are loaded or converted, not while serving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import (
    CODE,
    GROUP,
    QuantizedWeight,
    ScaleFormat,
    encode,
    require,
    scales_of,
    weight_scale_shape,
)
from equipoise_kernels.fp8.jit import constant, jit, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.quant.group_quant import VALUE_DTYPES, scales_of_amax
from equipoise_kernels.fp8.specialization import Specialization

_GROUP = constant(GROUP)
_NUM_WARPS = 8


def quantize_weight(
    weight: Tensor, *, scale_format: ScaleFormat = ScaleFormat.FP32
) -> QuantizedWeight:
    """Quantise weights with the backend selected for this process.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("weight", weight, *VALUE_DTYPES)
    if weight.dim() not in {2, 3} or weight.numel() == 0:
        raise KernelInputError(f"weight must be [N, K] or [S, N, K], not {list(weight.shape)}")
    weight = weight.contiguous()
    out = QuantizedWeight(
        codes=torch.empty_like(weight, dtype=CODE),
        scales=weight.new_empty(weight_scale_shape(weight.shape), dtype=torch.float32),
    )
    QUANTIZE_WEIGHT.on(weight.device)(weight, scale_format=scale_format, out=out)
    return out


def dequantize_weight(weight: QuantizedWeight, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Dequantise weights [.., N, K] to a dtype, with the backend selected for this process.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    if dtype not in VALUE_DTYPES:
        raise KernelInputError(f"weights can be dequantised to {VALUE_DTYPES}, not to {dtype}")
    out = torch.empty_like(weight.codes, dtype=dtype, memory_format=torch.contiguous_format)
    DEQUANTIZE_WEIGHT.on(out.device)(weight, out=out)
    return out


def quantize_weight_reference(
    weight: Tensor, *, scale_format: ScaleFormat, out: QuantizedWeight
) -> None:
    """The torch twin of quantisation."""
    num_rows, num_columns = weight.shape[-2:]
    padded = functional.pad(weight.float(), (0, -num_columns % GROUP, 0, -num_rows % GROUP))
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=(-3, -1))
    scales = scales_of(amax, scale_format)
    codes = encode(blocks, scales.unsqueeze(-1).unsqueeze(-3)).flatten(-4, -3).flatten(-2)
    out.scales.copy_(scales)
    out.codes.copy_(codes[..., :num_rows, :num_columns])


def dequantize_weight_reference(weight: QuantizedWeight, *, out: Tensor) -> None:
    """The torch twin of dequantisation."""
    out.copy_(weight.dequantized())


def quantize_weight_triton(
    weight: Tensor, *, scale_format: ScaleFormat, out: QuantizedWeight
) -> None:
    """Launch the quantisation, one program per block."""
    num_rows, num_columns = weight.shape[-2:]
    quantize_weight_kernel[_grid(out)](
        weight,
        out.codes,
        out.scales,
        num_rows,
        num_columns,
        UE8M0=scale_format is ScaleFormat.UE8M0,
        num_warps=_NUM_WARPS,
    )


def dequantize_weight_triton(weight: QuantizedWeight, *, out: Tensor) -> None:
    """Launch the dequantisation, one program per block."""
    num_rows, num_columns = out.shape[-2:]
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    dequantize_weight_kernel[_grid(weight)](
        codes, scales, out, num_rows, num_columns, num_warps=_NUM_WARPS
    )


def _grid(weight: QuantizedWeight) -> tuple[int, int]:
    *outer, num_tall, num_wide = weight.scales.shape
    return num_tall * (outer[0] if outer else 1), num_wide


@jit
def quantize_weight_kernel(
    weight_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    UE8M0: tl.constexpr,
) -> None:
    """Each program quantises one block; all three arrays are contiguous."""
    places, inside = _block(num_rows, num_columns)
    x = tl.load(weight_ptr + places, mask=inside, other=0.0).to(tl.float32)
    # Kept as one element, because the interpreter cannot bit-cast scalars.
    amax = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    scales = scales_of_amax(tl.full((1, 1), 0.0, tl.float32) + amax, UE8M0)
    codes = x * tl.div_rn(tl.full((1, 1), 1.0, tl.float32), scales)
    tl.store(codes_ptr + places, codes.to(tl.float8e4nv), mask=inside)
    one = tl.arange(0, 1)
    scale_ptrs = scales_ptr + _scale_place(num_columns) + one[:, None] + one[None, :]
    tl.store(scale_ptrs, scales)


@jit
def dequantize_weight_kernel(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: int, num_columns: int
) -> None:
    """Each program dequantises one block; all three arrays are contiguous."""
    places, inside = _block(num_rows, num_columns)
    codes = tl.load(codes_ptr + places, mask=inside, other=0.0).to(tl.float32)
    values = codes * tl.load(scales_ptr + _scale_place(num_columns))
    tl.store(out_ptr + places, values.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _block(num_rows: int, num_columns: int) -> Any:
    """Offsets of this program's block, and which of them are inside the weights."""
    blocks_tall = tl.cdiv(num_rows, _GROUP)
    slot = (tl.program_id(0) // blocks_tall).to(tl.int64)
    rows = (tl.program_id(0) % blocks_tall) * _GROUP + tl.arange(0, _GROUP)
    columns = tl.program_id(1) * _GROUP + tl.arange(0, _GROUP)
    places = (slot * num_rows + rows)[:, None] * num_columns + columns[None, :]
    return places, (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@jit
def _scale_place(num_columns: int) -> Any:
    """Offset of this program's scale."""
    return tl.program_id(0).to(tl.int64) * tl.cdiv(num_columns, _GROUP) + tl.program_id(1)


def specializations() -> list[Specialization]:
    """Specialisations of the two kernels."""
    return [
        Specialization(
            kernel=quantize_weight_kernel,
            name="quantize_weight",
            types={"weight_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
            multiples_of_16="num_columns",
            options={"UE8M0": False, "num_warps": _NUM_WARPS},
        ),
        Specialization(
            kernel=dequantize_weight_kernel,
            name="dequantize_weight",
            types={"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "out_ptr": "*bf16"},
            multiples_of_16="num_columns",
            options={"num_warps": _NUM_WARPS},
        ),
    ]


QUANTIZE_WEIGHT: KernelOperation[Callable[..., None], None] = KernelOperation(
    name="weight_quant",
    backends={"reference": quantize_weight_reference, "triton": quantize_weight_triton},
    specializations=specializations,
)
DEQUANTIZE_WEIGHT: KernelOperation[Callable[..., None], None] = KernelOperation(
    name="weight_quant",
    backends={"reference": dequantize_weight_reference, "triton": dequantize_weight_triton},
    specializations=specializations,
)

"""Quantises rows in groups of 1 x 128.

Contract: x [M, K], bfloat16, float16 or float32, contiguous columns, any row stride; K a multiple
of 128, M may be 0. Codes [M, K] and scales [M, K / 128] follow the arithmetic of `formats`. The
bytes between the columns of MN-aligned scales are not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from equipoise_kernels.formats import (
    AMAX_FLOOR,
    CODE_MAX,
    GROUP,
    QuantizedRows,
    ScaleFormat,
    ScaleLayout,
    empty_rows,
    encode,
    require,
    require_groups,
    scales_of,
)
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.jit import constant, jit, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_FLOOR = constant(AMAX_FLOOR)
_CODE_MAX = constant(CODE_MAX)
_GROUP = constant(GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuantConfig:
    """Work of a program; rows and groups are powers of two."""

    rows: int
    """Rows per program."""
    groups: int
    """Groups of a row per program."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    GroupQuantConfig(rows=rows, groups=groups, num_warps=num_warps)
    for rows, groups, num_warps in product((1, 4, 16, 32), (1, 2, 4, 8), (1, 4, 8))
    if 256 <= rows * groups * GROUP // num_warps <= 2048
)


def group_quant(
    x_MK: Tensor,
    *,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    out: QuantizedRows | None = None,
) -> QuantizedRows:
    """Quantise rows with the backend selected for this process.

    Args:
        x_MK: rows.
        scale_format: which values scales may have.
        scale_layout: memory layout of new scales; ignored with `out`.
        out: where to write, in any layout; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("x", x_MK, *VALUE_DTYPES)
    require_groups("x", x_MK)
    require("x", x_MK, shape=x_MK.shape[-2:], dense=True)
    out = checked_out(out, x_MK.shape, device=x_MK.device, layout=scale_layout)
    GROUP_QUANT.on(x_MK.device)(x_MK, scale_format=scale_format, out=out)
    return out


def group_quant_reference(x_MK: Tensor, *, scale_format: ScaleFormat, out: QuantizedRows) -> None:
    """The torch twin."""
    write_quantized(x_MK.float(), scale_format=scale_format, out=out)


def group_quant_triton(
    x_MK: Tensor,
    *,
    scale_format: ScaleFormat,
    out: QuantizedRows,
    config: GroupQuantConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_rows, num_groups = out.scales.shape
    if num_rows == 0:
        return
    config = config or GROUP_QUANT.config(rows=num_rows)
    grid = (-(-num_rows // config.rows), -(-num_groups // config.groups))
    group_quant_kernel[grid](
        x_MK,
        out.codes,
        out.scales,
        num_rows,
        num_groups,
        x_MK.stride(0),
        out.codes.stride(0),
        *out.scales.stride(),
        UE8M0=scale_format is ScaleFormat.UE8M0,
        **configurations.options(config),
    )


@jit
def group_quant_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: int,
    num_groups: int,
    x_stride: int,
    code_stride: int,
    scale_row_stride: int,
    scale_group_stride: int,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Each program quantises ROWS x GROUPS groups with one load and one store."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    columns = groups[None, :, None] * _GROUP + tl.arange(0, _GROUP)[None, None, :]
    x = tl.load(
        x_ptr + rows[:, None, None] * x_stride + columns, mask=inside[:, :, None], other=0.0
    )
    codes, scales = quantized(x.to(tl.float32), UE8M0)
    code_ptrs = codes_ptr + rows[:, None, None] * code_stride + columns
    tl.store(code_ptrs, codes, mask=inside[:, :, None])
    scale_places = rows[:, None] * scale_row_stride + groups[None, :] * scale_group_stride
    tl.store(scales_ptr + scale_places, scales, mask=inside)


@jit
def quantized(x: tl.tensor, UE8M0: tl.constexpr) -> Any:
    """Codes and scales of float32 groups [A, B, 128]: the device's twin of `formats`."""
    scales = scales_of_amax(tl.max(tl.abs(x), axis=2), UE8M0)
    inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    return (x * inverse[:, :, None]).to(tl.float8e4nv), scales


@jit
def scales_of_amax(amax: tl.tensor, UE8M0: tl.constexpr) -> Any:
    """Scales of groups with the given largest absolute values, float32 of any shape."""
    amax = tl.maximum(amax, _FLOOR)
    scales = tl.div_rn(amax, tl.full(amax.shape, _CODE_MAX, tl.float32))
    if UE8M0:
        bits = scales.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scales = (exponent << 23).to(tl.float32, bitcast=True)
    return scales


def checked_out(
    out: QuantizedRows | None,
    shape: torch.Size,
    *,
    device: torch.device,
    layout: ScaleLayout,
) -> QuantizedRows:
    """Return the caller's output if it fits, or allocate one."""
    if out is None:
        return empty_rows(shape, device=device, layout=layout)
    require("out", out.codes, shape=shape, dense=True)
    if out.codes.device != device:
        require("out", out.codes, like=torch.empty(0, device=device))
    return out


def write_quantized(x: Tensor, *, scale_format: ScaleFormat, out: QuantizedRows) -> None:
    """Quantise float32 rows [.., M, K] into `out` with torch."""
    groups = x.unflatten(-1, (-1, GROUP))
    amax = groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=-1)
    scales = scales_of(amax, scale_format)
    out.scales.copy_(scales)
    out.codes.copy_(encode(groups, scales.unsqueeze(-1)).flatten(-2))


def specializations(config: GroupQuantConfig) -> list[Specialization]:
    """Specialisations of a configuration: both scale formats."""
    return [
        Specialization(
            kernel=group_quant_kernel,
            name=f"group_quant {config} {scale_format.value}",
            types={"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
            multiples_of_16="x_stride code_stride",
            options=configurations.options(config) | {"UE8M0": scale_format is ScaleFormat.UE8M0},
        )
        for scale_format in ScaleFormat
    ]


GROUP_QUANT = KernelOperation(
    name="group_quant",
    backends={"reference": group_quant_reference, "triton": group_quant_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

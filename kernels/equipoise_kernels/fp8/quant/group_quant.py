"""Quantises rows in groups of 1 x 128.

Contract: x [M, K], bfloat16, float16 or float32, contiguous columns, any row stride; K a multiple
of 128, M may be 0. Codes [M, K] and scales [M, K / 128] follow the arithmetic of `formats`. The
bytes between the columns of MN-aligned scales are not written.

Masked form: x [G, M, K] and `rows_per_group` [G]; only the first rows_per_group[g] rows of group g
are read and written, with counts clamped to [0, M].
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
    x: Tensor,
    *,
    rows_per_group: Tensor | None = None,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    out: QuantizedRows | None = None,
) -> QuantizedRows:
    """Quantise rows with the backend selected for this process.

    Args:
        x: rows [M, K], or [G, M, K] with `rows_per_group`.
        rows_per_group: int32 [G]; only the first rows of each group are read and written.
        scale_format: which values scales may have.
        scale_layout: memory layout of new scales; ignored with `out`.
        out: where to write, in any layout; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("x", x, *VALUE_DTYPES)
    require_groups("x", x)
    if rows_per_group is None:
        require("x", x, shape=x.shape[-2:], dense=True)
    else:
        require("x", x, shape=x.shape[-3:], dense=True)
        require(
            "rows_per_group",
            rows_per_group,
            torch.int32,
            shape=x.shape[:-2],
            contiguous=True,
            like=x,
        )
    out = checked_out(out, x.shape, device=x.device, layout=scale_layout)
    GROUP_QUANT.on(x.device)(x, rows_per_group=rows_per_group, scale_format=scale_format, out=out)
    return out


def group_quant_reference(
    x: Tensor,
    *,
    rows_per_group: Tensor | None = None,
    scale_format: ScaleFormat,
    out: QuantizedRows,
) -> None:
    """The torch twin."""
    if rows_per_group is None:
        write_quantized(x.float(), scale_format=scale_format, out=out)
        return
    for group, count in enumerate(rows_per_group.clamp(0, x.shape[1]).tolist()):
        write_quantized(
            x[group, :count].float(),
            scale_format=scale_format,
            out=QuantizedRows(codes=out.codes[group, :count], scales=out.scales[group, :count]),
        )


def group_quant_triton(
    x: Tensor,
    *,
    rows_per_group: Tensor | None = None,
    scale_format: ScaleFormat,
    out: QuantizedRows,
    config: GroupQuantConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    if out.codes.numel() == 0:
        return
    *_, max_rows, num_groups = out.scales.shape
    config = config or GROUP_QUANT.config(rows=max_rows)
    is_masked = rows_per_group is not None
    # Without a mask there is one outer group, whose stride is not used.
    x_GMK, codes_GMK, scales_GMB = (
        tensor if is_masked else tensor.unsqueeze(0) for tensor in (x, out.codes, out.scales)
    )
    num_blocks = -(-max_rows // config.rows)
    group_quant_kernel[(num_blocks * x_GMK.shape[0], -(-num_groups // config.groups))](
        x_GMK,
        rows_per_group if is_masked else x,
        codes_GMK,
        scales_GMB,
        max_rows,
        num_groups,
        *x_GMK.stride()[:2],
        *codes_GMK.stride()[:2],
        *scales_GMB.stride(),
        UE8M0=scale_format is ScaleFormat.UE8M0,
        MASKED=is_masked,
        **configurations.options(config),
    )


@jit
def group_quant_kernel(
    x_ptr: tl.tensor,
    rows_per_group_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    max_rows: int,
    num_groups: int,
    x_outer_stride: int,
    x_stride: int,
    code_outer_stride: int,
    code_stride: int,
    scale_outer_stride: int,
    scale_row_stride: int,
    scale_group_stride: int,
    UE8M0: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Each program quantises ROWS x GROUPS groups; programs without real rows return early."""
    num_blocks = tl.cdiv(max_rows, ROWS)
    outer = (tl.program_id(0) // num_blocks).to(tl.int64)
    first_row = (tl.program_id(0) % num_blocks) * ROWS
    num_rows = max_rows
    if MASKED:
        num_rows = tl.minimum(tl.load(rows_per_group_ptr + outer), max_rows)
    if first_row >= num_rows:
        return
    rows = first_row.to(tl.int64) + tl.arange(0, ROWS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    columns = groups[None, :, None] * _GROUP + tl.arange(0, _GROUP)[None, None, :]
    x_ptrs = x_ptr + outer * x_outer_stride + rows[:, None, None] * x_stride + columns
    x = tl.load(x_ptrs, mask=inside[:, :, None], other=0.0)
    codes, scales = quantized(x.to(tl.float32), UE8M0)
    code_ptrs = codes_ptr + outer * code_outer_stride + rows[:, None, None] * code_stride + columns
    tl.store(code_ptrs, codes, mask=inside[:, :, None])
    scale_ptrs = scales_ptr + outer * scale_outer_stride + rows[:, None] * scale_row_stride
    tl.store(scale_ptrs + groups[None, :] * scale_group_stride, scales, mask=inside)


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
    """Specialisations of a configuration: both scale formats, and masked."""
    kinds = [*((scale_format, False) for scale_format in ScaleFormat), (ScaleFormat.FP32, True)]
    return [
        Specialization(
            kernel=group_quant_kernel,
            name=f"group_quant {config} {scale_format.value} masked={masked}",
            types={
                "x_ptr": "*bf16",
                "rows_per_group_ptr": "*i32",
                "codes_ptr": "*fp8e4nv",
                "scales_ptr": "*fp32",
            },
            multiples_of_16="x_outer_stride x_stride code_outer_stride code_stride",
            options=configurations.options(config)
            | {"UE8M0": scale_format is ScaleFormat.UE8M0, "MASKED": masked},
        )
        for scale_format, masked in kinds
    ]


GROUP_QUANT = KernelOperation(
    name="group_quant",
    backends={"reference": group_quant_reference, "triton": group_quant_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

"""SwiGLU's activation directly to FP8: silu(gate) * up, quantised in groups of 1 x 128.

Contract: x [M, 2 I] or [G, M, 2 I], bfloat16 or float32, contiguous columns, the gate's I columns
first, then up's; I a multiple of 128. silu and the product are float32, not rounded before the
codes. Masked form: `rows_per_group` int32 [G] on the device gives the number of real rows of each
group; the codes and scales of other rows are not written. Counts are clamped to 0 .. M.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import (
    GROUP,
    QuantizedRows,
    ScaleFormat,
    ScaleLayout,
    require,
    require_groups,
)
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.jit import constant, jit, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.quant.group_quant import checked_out, quantized, write_quantized
from equipoise_kernels.fp8.specialization import Specialization

_GROUP = constant(GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiluMulQuantConfig:
    """Work of a program; rows and groups are powers of two."""

    rows: int
    """Rows per program."""
    groups: int
    """Groups of a row per program."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    SiluMulQuantConfig(rows=rows, groups=groups, num_warps=num_warps)
    for rows, groups, num_warps in product((1, 4, 16, 32), (1, 2, 4, 8), (1, 4, 8))
    if 256 <= rows * groups * GROUP // num_warps <= 1024
)


def silu_mul_quant(
    x: Tensor,
    *,
    rows_per_group: Tensor | None = None,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    out: QuantizedRows | None = None,
) -> QuantizedRows:
    """Activate and quantise rows with the backend selected for this process.

    Args:
        x: rows [M, 2 I], or [G, M, 2 I] with `rows_per_group`.
        rows_per_group: int32 [G], real rows of each group.
        scale_format: which values scales may have.
        scale_layout: memory layout of new scales; ignored with `out`.
        out: where to write, [.., M, I]; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("x", x, torch.bfloat16, torch.float32)
    if x.dim() != (2 if rows_per_group is None else 3):
        raise KernelInputError(
            f"x must be [M, 2 I], or [G, M, 2 I] with rows_per_group, not {list(x.shape)}"
        )
    if x.shape[-1] % (2 * GROUP) != 0:
        raise KernelInputError(
            f"x must have 2 I columns, I a multiple of {GROUP}, not {x.shape[-1]}"
        )
    require_groups("x", x)
    require("x", x, dense=True)
    if rows_per_group is not None:
        require(
            "rows_per_group",
            rows_per_group,
            torch.int32,
            shape=x.shape[:1],
            contiguous=True,
            like=x,
        )
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
    out = checked_out(out, shape, device=x.device, layout=scale_layout)
    SILU_MUL_QUANT.on(x.device)(
        x, rows_per_group=rows_per_group, scale_format=scale_format, out=out
    )
    return out


def silu_mul_quant_reference(
    x: Tensor, *, rows_per_group: Tensor | None, scale_format: ScaleFormat, out: QuantizedRows
) -> None:
    """The torch twin."""
    if rows_per_group is None:
        gate, up = x.float().chunk(2, dim=-1)
        write_quantized(functional.silu(gate) * up, scale_format=scale_format, out=out)
        return
    for group, count in enumerate(rows_per_group.clamp(0, x.shape[1]).tolist()):
        silu_mul_quant_reference(
            x[group, :count],
            rows_per_group=None,
            scale_format=scale_format,
            out=QuantizedRows(codes=out.codes[group, :count], scales=out.scales[group, :count]),
        )


def silu_mul_quant_triton(
    x: Tensor,
    *,
    rows_per_group: Tensor | None,
    scale_format: ScaleFormat,
    out: QuantizedRows,
    config: SiluMulQuantConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    if out.codes.numel() == 0:
        return
    *_, max_rows, num_groups = out.scales.shape
    config = config or SILU_MUL_QUANT.config(rows=max_rows)
    is_masked = rows_per_group is not None
    # Without a mask there is one outer group, whose stride is not used.
    x_GMH, codes_GMI, scales_GMB = (
        tensor if is_masked else tensor.unsqueeze(0) for tensor in (x, out.codes, out.scales)
    )
    num_blocks = -(-max_rows // config.rows)
    silu_mul_quant_kernel[(num_blocks * x_GMH.shape[0], -(-num_groups // config.groups))](
        x_GMH,
        rows_per_group if is_masked else x,
        codes_GMI,
        scales_GMB,
        max_rows,
        num_groups,
        x_GMH.stride(0),
        x_GMH.stride(1),
        codes_GMI.stride(0),
        codes_GMI.stride(1),
        *scales_GMB.stride(),
        UE8M0=scale_format is ScaleFormat.UE8M0,
        MASKED=is_masked,
        **configurations.options(config),
    )


@jit
def silu_mul_quant_kernel(
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
    """Each program computes ROWS x GROUPS groups; programs without real rows return early."""
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
    mask = inside[:, :, None]
    gate_ptrs = x_ptr + outer * x_outer_stride + rows[:, None, None] * x_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + num_groups * _GROUP, mask=mask, other=0.0).to(tl.float32)
    codes, scales = quantized(gate / (1.0 + tl.exp(-gate)) * up, UE8M0)
    code_ptrs = codes_ptr + outer * code_outer_stride + rows[:, None, None] * code_stride + columns
    tl.store(code_ptrs, codes, mask=mask)
    scale_ptrs = scales_ptr + outer * scale_outer_stride + rows[:, None] * scale_row_stride
    tl.store(scale_ptrs + groups[None, :] * scale_group_stride, scales, mask=inside)


def specializations(config: SiluMulQuantConfig) -> list[Specialization]:
    """Specialisations of a configuration: plain and masked."""
    return [
        Specialization(
            kernel=silu_mul_quant_kernel,
            name=f"silu_mul_quant {config} masked={masked}",
            types={
                "x_ptr": "*bf16",
                "rows_per_group_ptr": "*i32",
                "codes_ptr": "*fp8e4nv",
                "scales_ptr": "*fp32",
            },
            multiples_of_16="num_groups x_outer_stride x_stride code_outer_stride code_stride",
            options=configurations.options(config) | {"UE8M0": False, "MASKED": masked},
        )
        for masked in (False, True)
    ]


SILU_MUL_QUANT = KernelOperation(
    name="silu_mul_quant",
    backends={"reference": silu_mul_quant_reference, "triton": silu_mul_quant_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

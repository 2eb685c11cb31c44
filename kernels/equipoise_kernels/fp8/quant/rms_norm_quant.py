"""Root-mean-square norm of rows, after adding a residual, directly to FP8.

Contract: x [M, D] bfloat16 or float32, contiguous columns; weight [D] of x's dtype; D a multiple of
128, M may be 0. With a residual (x's dtype and shape) the rows are h = x + residual, rounded to x's
dtype, and h replaces the residual in place, for the next layer. The result is that of `rms_norm` on
h followed by `group_quant`, with the same two roundings to x's dtype; only the order in which
squares are summed (float32) differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.formats import (
    GROUP,
    QuantizedRows,
    ScaleFormat,
    ScaleLayout,
    require,
    require_groups,
)
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.jit import constant, jit, next_power_of_two, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.quant.group_quant import checked_out, quantized, write_quantized
from equipoise_kernels.fp8.specialization import Specialization
from equipoise_kernels.plain.rms_norm import rms_norm

_GROUP = constant(GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormQuantConfig:
    """Launch parameters; a program normalises one row."""

    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(RmsNormQuantConfig(num_warps=num_warps) for num_warps in (4, 8, 16))


def rms_norm_quant(
    x_MD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    residual_MD: Tensor | None = None,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    out: QuantizedRows | None = None,
) -> QuantizedRows:
    """Normalise and quantise rows with the backend selected for this process.

    Args:
        x_MD: rows.
        weight_D: one factor per column.
        eps: added to the mean square.
        residual_MD: added to the rows, and overwritten with the sum.
        scale_format: which values scales may have.
        scale_layout: memory layout of new scales; ignored with `out`.
        out: where to write; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("x", x_MD, torch.bfloat16, torch.float32)
    require_groups("x", x_MD)
    require("x", x_MD, shape=x_MD.shape[-2:], dense=True)
    require("weight", weight_D, x_MD.dtype, shape=x_MD.shape[-1:], like=x_MD)
    if residual_MD is not None:
        require("residual", residual_MD, x_MD.dtype, shape=x_MD.shape, dense=True, like=x_MD)
    out = checked_out(out, x_MD.shape, device=x_MD.device, layout=scale_layout)
    RMS_NORM_QUANT.on(x_MD.device)(
        x_MD,
        weight_D.contiguous(),
        eps=eps,
        residual_MD=residual_MD,
        scale_format=scale_format,
        out=out,
    )
    return out


def rms_norm_quant_reference(
    x_MD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    residual_MD: Tensor | None,
    scale_format: ScaleFormat,
    out: QuantizedRows,
) -> None:
    """The torch twin."""
    if residual_MD is not None:
        x_MD = residual_MD.copy_((x_MD.float() + residual_MD.float()).to(x_MD.dtype))
    normed_MD = rms_norm(x_MD, weight_D, eps, row_block=None)
    write_quantized(normed_MD.float(), scale_format=scale_format, out=out)


def rms_norm_quant_triton(
    x_MD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    residual_MD: Tensor | None,
    scale_format: ScaleFormat,
    out: QuantizedRows,
    config: RmsNormQuantConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_rows, dim = x_MD.shape
    if num_rows == 0:
        return
    config = config or RMS_NORM_QUANT.config(rows=num_rows)
    residual = x_MD if residual_MD is None else residual_MD
    rms_norm_quant_kernel[(num_rows,)](
        x_MD,
        residual,
        weight_D,
        out.codes,
        out.scales,
        eps,
        x_MD.stride(0),
        residual.stride(0),
        out.codes.stride(0),
        *out.scales.stride(),
        UE8M0=scale_format is ScaleFormat.UE8M0,
        ADD_RESIDUAL=residual_MD is not None,
        GROUPS=dim // GROUP,
        PADDED_GROUPS=next_power_of_two(dim // GROUP),
        **configurations.options(config),
    )


@jit
def rms_norm_quant_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    eps: float,
    x_stride: int,
    residual_stride: int,
    code_stride: int,
    scale_row_stride: int,
    scale_group_stride: int,
    UE8M0: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
) -> None:
    """Each program normalises one row, held in registers as [1, groups, 128]."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, PADDED_GROUPS)
    columns = groups[None, :, None] * _GROUP + tl.arange(0, _GROUP)[None, None, :]
    inside = (groups < GROUPS)[None, :, None]
    stored = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    x = stored.to(tl.float32)
    if ADD_RESIDUAL:
        residual_ptrs = residual_ptr + row * residual_stride + columns
        x += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptrs, x.to(stored.dtype), mask=inside)
        x = x.to(stored.dtype).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=2), axis=1) / (GROUPS * _GROUP)
    norm = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    scaled = (x * norm[:, None, None]).to(stored.dtype).to(tl.float32) * weight.to(tl.float32)
    codes, scales = quantized(scaled.to(stored.dtype).to(tl.float32), UE8M0)
    tl.store(codes_ptr + row * code_stride + columns, codes, mask=inside)
    scale_ptrs = scales_ptr + row * scale_row_stride + groups[None, :] * scale_group_stride
    tl.store(scale_ptrs, scales, mask=(groups < GROUPS)[None, :])


def specializations(config: RmsNormQuantConfig, dim: int) -> list[Specialization]:
    """Specialisations of a configuration: with and without a residual."""
    return [
        Specialization(
            kernel=rms_norm_quant_kernel,
            name=f"rms_norm_quant {config} dim={dim} residual={residual}",
            types={
                "x_ptr residual_ptr weight_ptr": "*bf16",
                "codes_ptr": "*fp8e4nv",
                "scales_ptr": "*fp32",
                "eps": "fp32",
            },
            multiples_of_16="x_stride residual_stride code_stride",
            options=configurations.options(config)
            | {
                "UE8M0": False,
                "ADD_RESIDUAL": residual,
                "GROUPS": dim // GROUP,
                "PADDED_GROUPS": next_power_of_two(dim // GROUP),
            },
        )
        for residual in (False, True)
    ]


RMS_NORM_QUANT = KernelOperation(
    name="rms_norm_quant",
    backends={"reference": rms_norm_quant_reference, "triton": rms_norm_quant_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

"""Inputs that expose mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise_kernels.formats import (
    CODE,
    GROUP,
    QuantizedRows,
    QuantizedWeight,
    ScaleFormat,
    ScaleLayout,
    empty_rows,
    weight_scale_shape,
)
from equipoise_kernels.fp8.quant.group_quant import write_quantized
from equipoise_kernels.fp8.quant.weight_quant import quantize_weight_reference

_OUTLIER_SHARE = 0.001
_OUTLIER_FACTOR = 30.0


def spread_normal(
    shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normal values whose 1 x 128 groups differ in scale, 2^-8 to 2^8, with 0.1 % outliers.

    Code that ignores a scale, or uses a neighbour's, fails on these. K is padded to whole groups
    and cut again.
    """
    device = generator.device
    *outer, num_columns = shape
    num_groups = -(-num_columns // GROUP)
    exponents = torch.randint(-8, 9, (*outer, num_groups), generator=generator, device=device)
    spread = torch.exp2(exponents.float()).repeat_interleave(GROUP, dim=-1)[..., :num_columns]
    values = torch.randn(tuple(shape), generator=generator, device=device)
    chance = torch.rand(tuple(shape), generator=generator, device=device)
    values *= torch.where(chance < _OUTLIER_SHARE, _OUTLIER_FACTOR, 1.0)
    return (values * spread).to(dtype)


def spread_rows(
    shape: Sequence[int],
    generator: torch.Generator,
    *,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    scale_format: ScaleFormat = ScaleFormat.FP32,
) -> QuantizedRows:
    """Quantised rows of `spread_normal`."""
    x = spread_normal(shape, generator)
    out = empty_rows(shape, device=x.device, layout=layout)
    write_quantized(x.float(), scale_format=scale_format, out=out)
    return out


def spread_weight(shape: Sequence[int], generator: torch.Generator) -> QuantizedWeight:
    """Quantised weights [.., N, K] whose 128 x 128 blocks differ in scale, 2^-4 to 2^4."""
    device = generator.device
    scale_shape = weight_scale_shape(shape)
    exponents = torch.randint(-4, 5, scale_shape, generator=generator, device=device)
    tall = torch.exp2(exponents.float()).repeat_interleave(GROUP, dim=-2)[..., : shape[-2], :]
    spread = tall.repeat_interleave(GROUP, dim=-1)[..., : shape[-1]]
    values = torch.randn(tuple(shape), generator=generator, device=device) * spread
    out = QuantizedWeight(
        codes=torch.empty(tuple(shape), dtype=CODE, device=device),
        scales=torch.empty(scale_shape, device=device),
    )
    quantize_weight_reference(values, scale_format=ScaleFormat.FP32, out=out)
    return out


def spread_slab(
    num_slots: int, shape: tuple[int, int], generator: torch.Generator
) -> QuantizedWeight:
    """`spread_weight` for [slots, N, K], slot by slot: a float32 copy of all may not fit."""
    slots = [spread_weight(shape, generator) for _ in range(num_slots)]
    return QuantizedWeight(
        codes=torch.stack([slot.codes.view(torch.uint8) for slot in slots]).view(CODE),
        scales=torch.stack([slot.scales for slot in slots]),
    )

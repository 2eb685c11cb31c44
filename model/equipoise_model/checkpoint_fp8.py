"""FP8 weights of checkpoints: E4M3 codes and a float32 scale for every 128 x 128 block.

Owns the walk over large matrices, strip by strip, so that little memory is in use at once. The
format and its arithmetic are `equipoise_kernels.formats`'.
"""

import torch
from torch import Tensor

from equipoise_kernels.formats import GROUP, QuantizedWeight, ScaleFormat, weight_scale_shape
from equipoise_kernels.fp8.quant.weight_quant import dequantize_weight, quantize_weight
from equipoise_model.config import Fp8Config

STRIP_BYTES = 1 << 20


def quantize(weight: Tensor, fp8: Fp8Config) -> QuantizedWeight:
    """Codes of weights [N, K] of any float dtype, on their device; edges need not be whole blocks.

    The rounding is that of DeepSeek-V3: largest absolute value of a block / 448, by float32.
    """
    scale_format = ScaleFormat.FP32 if fp8.scale_fmt is None else ScaleFormat.UE8M0
    out = QuantizedWeight(
        codes=torch.empty_like(weight, dtype=torch.float8_e4m3fn),
        scales=weight.new_empty(weight_scale_shape(weight.shape), dtype=torch.float32),
    )
    step = strip_rows(weight.shape[1])
    for first in range(0, weight.shape[0], step):
        part = quantize_weight(weight[first : first + step], scale_format=scale_format)
        out.codes[first : first + step].copy_(part.codes)
        out.scales[scale_rows(first, part.codes)].copy_(part.scales)
    return out


def dequantize_strip(codes: Tensor, scales: Tensor, *, first: int) -> Tensor:
    """BF16 weights of consecutive rows of a matrix, whose first begins a row of blocks.

    `codes` are those rows [n, K], `scales` the whole matrix's. Published weights are used in BF16
    in just this way: code times scale in float32, rounded once.
    """
    assert first % GROUP == 0
    strip = QuantizedWeight(codes=codes, scales=scales[scale_rows(first, codes)])
    return dequantize_weight(strip, dtype=torch.bfloat16)


def strip_rows(num_columns: int) -> int:
    """Rows of a strip of codes of about STRIP_BYTES, in whole blocks and at least one."""
    return max(STRIP_BYTES // num_columns // GROUP, 1) * GROUP


def scale_rows(first: int, codes: Tensor) -> slice:
    """The rows of scales that belong to rows of codes beginning at row `first`."""
    return slice(first // GROUP, -(-(first + codes.shape[0]) // GROUP))

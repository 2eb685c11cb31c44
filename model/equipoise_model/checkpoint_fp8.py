"""FP8 weights of checkpoints: E4M3 codes and a float32 scale for every 128 x 128 block.

Walks large matrices strip by strip, so that little memory is in use at once. The format and its
arithmetic belong to `equipoise_kernels.formats`.
"""

import torch
from torch import Tensor

from equipoise_kernels.formats import GROUP, QuantizedWeight, ScaleFormat, weight_scale_shape
from equipoise_kernels.fp8.quant.weight_quant import dequantize_weight, quantize_weight
from equipoise_model.config import Fp8Config

STRIP_BYTES = 1 << 20


def quantize(weight: Tensor, fp8: Fp8Config) -> QuantizedWeight:
    """Quantise weights [N, K] of any float dtype, on their device; edge blocks may be partial.

    Rounds like DeepSeek-V3: a block's largest absolute value / 448, in float32.
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
    """Return BF16 weights of consecutive rows of a matrix; the first row starts a row of blocks.

    `codes` are those rows [n, K], `scales` the whole matrix's. Published checkpoints are used in
    BF16 the same way: code times scale in float32, rounded once.
    """
    assert first % GROUP == 0
    strip = QuantizedWeight(codes=codes, scales=scales[scale_rows(first, codes)])
    return dequantize_weight(strip, dtype=torch.bfloat16)


def strip_rows(num_columns: int) -> int:
    """Rows per strip of about STRIP_BYTES of codes: whole blocks, at least one."""
    return max(STRIP_BYTES // num_columns // GROUP, 1) * GROUP


def scale_rows(first: int, codes: Tensor) -> slice:
    """The rows of scales for rows of codes that start at row `first`."""
    return slice(first // GROUP, -(-(first + codes.shape[0]) // GROUP))

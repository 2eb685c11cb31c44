"""Softmax in kernels over positions that arrive step by step (arXiv 1805.02867).

Scores are in units of log 2, because the hardware raises 2 to a power: their scale has a factor of
`LOG2_E`. Logarithms of sums are natural.
"""

from __future__ import annotations

import math

from equipoise_kernels.fp8.jit import constant, jit, tl

LOG2_E = constant(math.log2(math.e))
_LN_2 = constant(math.log(2.0))


@jit
def added(
    largest: tl.tensor, total: tl.tensor, acc: tl.tensor, scores: tl.tensor, values: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Update the largest score, the sum of weights and that of values with a step's positions.

    With `total` [rows, positions of a step], the caller adds up each row at the end. That saves an
    exchange in every step where several warps share a row.
    """
    larger = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - larger[:, None])
    fading = tl.exp2(largest - larger)
    if len(total.shape) == 2:
        total = total * fading[:, None] + weights
    else:
        total = total * fading + tl.sum(weights, axis=1)
    acc = product(weights.to(values.dtype), values, acc * fading[:, None])
    return larger, total, acc


@jit
def product(left: tl.tensor, right: tl.tensor, acc: tl.tensor = None) -> tl.tensor:
    """Multiply in full float32, without TF32; a mixed pair in the right operand's dtype."""
    return tl.dot(left.to(right.dtype), right, acc, input_precision="ieee")


@jit
def closed(largest: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the divisor of summed values, and the natural logarithm of a sum with a largest score.

    1 and minus infinity for an empty sum.
    """
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    return divisor, tl.where(is_empty, float("-inf"), largest * _LN_2 + tl.log(divisor))

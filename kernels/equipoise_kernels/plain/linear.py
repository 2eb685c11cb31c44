"""Linear map of rows, fast or batch-invariant.

BLAS chooses its code, and with it the order of its sums, by the shape of the whole product, so a
row's result depends on how many rows it is batched with. The batch-invariant form always calls BLAS
with one shape, `row_block` rows at a time, as in Thinking Machines Lab's "Defeating Nondeterminism
in LLM Inference" (2025).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def linear(x_TD: Tensor, weight_OD: Tensor, *, row_block: int | None) -> Tensor:
    """Multiply rows by a transposed weight, x W^T: [T, O].

    Differentiable in both forms.

    Args:
        x_TD: rows; T may be 0.
        weight_OD: weights of the rows' dtype.
        row_block: None for one product of all rows. A number of rows: each product has exactly that
            many, the last one filled up with zeros, so that a row's result does not depend on its
            neighbours (see `verify_row_invariance`).
    """
    return by_row_blocks(lambda x: functional.linear(x, weight_OD), x_TD, row_block=row_block)


def by_row_blocks(
    function: Callable[[Tensor], Tensor], x_TD: Tensor, *, row_block: int | None
) -> Tensor:
    """Apply a function of rows to all of them, or to blocks of exactly `row_block` rows.

    Vectorised code computes the elements after the last whole vector differently, with other
    rounding. In blocks of one shape, the same code always computes an element.
    """
    num_rows = x_TD.shape[0]
    if row_block is None or num_rows == 0:
        return function(x_TD)
    padded = pad_rows(x_TD, row_block=row_block)
    if num_rows <= row_block:
        return function(padded)[:num_rows]
    return torch.cat([function(block) for block in padded.split(row_block)])[:num_rows]


def pad_rows(x_TD: Tensor, *, row_block: int) -> Tensor:
    """Pad rows with zeros to whole blocks, contiguous."""
    missing = -x_TD.shape[0] % row_block
    padded = torch.constant_pad_nd(x_TD, (0, 0, 0, missing)) if missing else x_TD
    return padded.contiguous()

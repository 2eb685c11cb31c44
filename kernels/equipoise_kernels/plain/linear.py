"""Linear map of rows, fast or batch-invariant.

BLAS picks its code, and with it the order of its sums, by the shape of the whole product: a row's
result then depends on how many rows it came with. The batch-invariant form gives BLAS one shape
only, `row_block` rows at a time, as in Thinking Machines Lab's "Defeating Nondeterminism in LLM
Inference" (2025).
"""

import torch
from torch import Tensor
from torch.nn import functional


def linear(x_TD: Tensor, weight_OD: Tensor, *, row_block: int | None) -> Tensor:
    """Product x W^T of rows, [T, O].

    Args:
        x_TD: rows; T may be 0.
        weight_OD: weights of the rows' dtype.
        row_block: None for one product of all rows. A number of rows: each product has exactly
            that many, the last one's missing rows being zeros, so that a row's result does not
            depend on its neighbours (see `verify_row_invariance`). Differentiable in both forms.
    """
    if row_block is None or x_TD.shape[0] == 0:
        return functional.linear(x_TD, weight_OD)
    num_rows = x_TD.shape[0]
    blocks = pad_rows(x_TD, row_block=row_block).split(row_block)
    return torch.cat([functional.linear(block, weight_OD) for block in blocks])[:num_rows]


def pad_rows(x_TD: Tensor, *, row_block: int) -> Tensor:
    """Rows and as many zero rows as fill the last block, contiguous."""
    missing = -x_TD.shape[0] % row_block
    padded = functional.pad(x_TD, (0, 0, 0, missing)) if missing else x_TD
    return padded.contiguous()

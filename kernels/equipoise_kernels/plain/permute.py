"""Rows into slot order and back: gathers by a stable sort, so equal inputs give equal orders."""

import torch
from torch import Tensor


def slot_order(slots_N: Tensor) -> Tensor:
    """Order that sorts pairs by slot; pairs of one slot keep their order. int64 [N], N may be 0."""
    return slots_N.argsort(stable=True)


def permute_rows(x_TD: Tensor, order_N: Tensor, *, top_k: int) -> Tensor:
    """The rows of (row, choice) pairs, [N, D], in an order of the N = T * top_k pairs.

    Pair n is choice n % top_k of row n // top_k. Differentiable.
    """
    return x_TD.index_select(0, order_N // top_k)


def unpermute_rows(y_ND: Tensor, order_N: Tensor) -> Tensor:
    """Undo an order: row n of the result is the pair n's. Differentiable."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return y_ND.index_select(0, inverse_N)

"""Rows into slot order and back. A stable sort makes equal inputs give equal orders."""

import torch
from torch import Tensor


def slot_order(slots_N: Tensor) -> Tensor:
    """The order that sorts assignments by slot, stable: int64 [N]; N may be 0."""
    return slots_N.argsort(stable=True)


def permute_rows(x_TD: Tensor, order_N: Tensor, *, top_k: int) -> Tensor:
    """Gather the rows of assignments, [N, D], in an order of the N = T * top_k assignments.

    Assignment n is choice n % top_k of row n // top_k. Differentiable.
    """
    return x_TD.index_select(0, order_N // top_k)


def unpermute_rows(y_ND: Tensor, order_N: Tensor) -> Tensor:
    """Undo an order: row n of the result belongs to assignment n. Differentiable."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return y_ND.index_select(0, inverse_N)

"""Checks on this machine that a product of fixed-shape row blocks depends on its row alone.

Batch-invariant mode relies on the BLAS library: with the shape fixed, a row's result must not
depend on its place in the block, on its neighbours, or on the addresses of weights and rows. No
library promises that, so a process tests its own weight shapes before it serves.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise_kernels.plain.linear import linear

_NUM_PLACES = 4


class RowVarianceError(RuntimeError):
    """This machine's BLAS library computes a row differently in different places."""


def verify_row_invariance(
    weight_shapes: Iterable[tuple[int, int]],
    *,
    row_block: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Compare a row's product, bit by bit, over places in its block, neighbours and addresses.

    Args:
        weight_shapes: (out, in) of every weight of the model; duplicates are skipped.
        row_block: rows per block, as the model uses it.
        dtype: the weights' and rows'.
        device: the model's.

    Raises:
        RowVarianceError: a result differs, so batch-invariant mode does not hold.
    """
    generator = torch.Generator().manual_seed(0)
    for out_dim, in_dim in sorted(set(weight_shapes)):
        weight_OD = torch.randn(out_dim, in_dim, generator=generator).to(device, dtype)
        rows_TD = torch.randn(row_block, in_dim, generator=generator).to(device, dtype)
        expected = linear(rows_TD, weight_OD, row_block=row_block)
        for name, seen in _variants(rows_TD, weight_OD, row_block=row_block):
            if not torch.equal(seen, expected):
                raise RowVarianceError(
                    f"batch-invariant mode is not available here: a product with weights "
                    f"[{out_dim}, {in_dim}] depends on {name}; serve without it, or set "
                    "MKL_CBWR=COMPATIBLE and try again"
                )


def _variants(
    rows_TD: Tensor, weight_OD: Tensor, *, row_block: int
) -> Iterable[tuple[str, Tensor]]:
    """Yield the same rows' products, computed in other places, in the rows' original order."""
    for shift in range(1, row_block):
        rolled = linear(rows_TD.roll(shift, 0), weight_OD, row_block=row_block)
        yield "a row's place in its block", rolled.roll(-shift, 0)
    alone = [linear(row, weight_OD, row_block=row_block) for row in rows_TD.split(1)]
    yield "a row's neighbours", torch.cat(alone)
    many = linear(rows_TD.repeat(_NUM_PLACES, 1), weight_OD, row_block=row_block)
    for block in many.split(row_block):
        yield "a block's place among others", block
    for slot_weight in weight_OD.repeat(_NUM_PLACES, 1, 1).unbind():
        yield "the slot that holds the weights", linear(rows_TD, slot_weight, row_block=row_block)

"""Checks outputs against float64 of the dequantised operands, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise_kernels.formats import QuantizedRows, QuantizedWeight
from equipoise_kernels.numerics import difference

MAX_DIFFERENCE = 1e-3
MAX_BLOCK_DIFFERENCE = 5e-3
_BLOCK = 128
_REPEATS = 50


def product_faults(
    out: Tensor, a: QuantizedRows, weight: QuantizedWeight, *, label: str = ""
) -> list[str]:
    """Return the faults of a product [M, N]: overall, and in its worst 128 x 128 block."""
    exact = a.dequantized().double() @ weight.dequantized().double().T
    return result_faults(out, exact, label=label)


def result_faults(out: Tensor, exact: Tensor, *, label: str = "") -> list[str]:
    """Return the faults of a result [M, N], given the exact one."""
    faults = []
    overall = difference(out, exact)
    if not overall < MAX_DIFFERENCE:
        faults.append(f"{label}result is {overall:.1e} away from float64")
    worst = _worst_block(out.double(), exact)
    if not worst < MAX_BLOCK_DIFFERENCE:
        faults.append(f"{label}a 128 x 128 block is {worst:.1e} away from float64")
    return faults


def repeat_faults(call: Callable[[], object], out: Tensor) -> list[str]:
    """Check that repeated calls give the same bits."""
    call()
    first = out.clone().view(torch.uint8)
    for _ in range(_REPEATS):
        call()
        if not torch.equal(out.view(torch.uint8), first):
            return ["repeated calls give different bits"]
    return []


def backend_faults(names: list[str], expected: str) -> list[str]:
    """Check that the intended kernel ran."""
    if any(expected in name for name in names):
        return []
    return [f"no kernel named {expected} ran, but {sorted(set(names))}"]


def _worst_block(out: Tensor, exact: Tensor) -> float:
    worst = 0.0
    for x_rows, y_rows in zip(out.split(_BLOCK), exact.split(_BLOCK), strict=True):
        blocks = zip(x_rows.split(_BLOCK, dim=1), y_rows.split(_BLOCK, dim=1), strict=True)
        apart = torch.stack([_difference_on_device(x, y) for x, y in blocks])
        if apart.isnan().any():
            return float("nan")
        worst = max(worst, float(apart.max()))
    return worst


def _difference_on_device(x: Tensor, y: Tensor) -> Tensor:
    """`numerics.difference` without waiting for the device."""
    size = (x * x + y * y).sum()
    return torch.where(size == 0, 0.0, 1.0 - 2.0 * (x * y).sum() / size)

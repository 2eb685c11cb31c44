"""A measure of the difference between two results."""

from __future__ import annotations

import torch
from torch import Tensor


def difference(result: Tensor, expected: Tensor) -> float:
    """Return 1 - 2 <x, y> / (<x, x> + <y, y>) in float64, the measure of DeepGEMM's tests.

    0 for equal tensors, about half the squared relative error for close ones, NaN if either has a
    NaN. Two tensors of zeros, or without elements, are equal.
    """
    x, y = result.to(torch.float64).flatten(), expected.to(torch.float64).flatten()
    size = float(x @ x + y @ y)
    return 0.0 if size == 0.0 else 1.0 - 2.0 * float(x @ y) / size

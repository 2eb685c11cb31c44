"""Rotates interleaved pairs, each by its own angle (arXiv 2104.09864)."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (x0, x1), (x2, x3), ... of the last dimension.

    `cos` and `sin` are float32 [..., F] and broadcast to x [..., 2F]. The result has x's dtype,
    with all first elements before all second ones, as in Hugging Face's code.
    """
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)

"""Rotation of interleaved pairs by an angle for each (arXiv 2104.09864)."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (x0, x1), (x2, x3), ... of the last dimension.

    `cos` and `sin` are float32 and broadcast against x's first halves, [..., F] for x [..., 2F].
    The result, of x's dtype, has all firsts and then all seconds, as in Hugging Face's code.
    """
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)

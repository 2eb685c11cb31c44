"""`Rope`: rotary position embedding with optional YaRN (arXiv 2104.09864, 2309.00071).

Owns the frequencies and the rotation. DeepSeek stores rotary dimensions as interleaved pairs
(x0, x1), (x2, x3), ...; a rotated vector comes out as all firsts, then all seconds, as in Hugging
Face's code. Queries and keys are permuted alike, so scores do not see it.
"""

import math

import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig, RopeConfig, yarn_mscale


class Rope(nn.Module):
    """Tables of cosines and sines for every position up to `max_position_embeddings`.

    Tables rather than functions of the position: looking a row up is exact, so a token's rotation
    does not depend on what it is batched with.
    """

    cos_PF: Tensor
    sin_PF: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inv_freq_F, factor = frequencies(config.rope, dim=config.qk_rope_head_dim)
        positions_P = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles_PF = positions_P[:, None] * inv_freq_F
        self.register_buffer("cos_PF", angles_PF.cos() * factor, persistent=False)
        self.register_buffer("sin_PF", angles_PF.sin() * factor, persistent=False)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [T, F] each, of int64 positions."""
        return self.cos_PF[positions_T], self.sin_PF[positions_T]


def frequencies(rope: RopeConfig, *, dim: int) -> tuple[Tensor, float]:
    """Angular frequency of each pair, float32 [dim / 2], and the factor of cosines and sines."""
    wavelengths_F = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inv_freq_F = 1.0 / wavelengths_F
    if rope.factor is None:
        return inv_freq_F, 1.0
    stretched_F = 1.0 / (rope.factor * wavelengths_F)
    share_F = _stretched_share(rope, dim=dim)
    return stretched_F * share_F + inv_freq_F * (1 - share_F), _magnitude(rope)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last dimension.

    `cos` and `sin` are float32 and broadcast against x's first halves, [..., F] for x [..., 2F].
    """
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def _stretched_share(rope: RopeConfig, *, dim: int) -> Tensor:
    """How much of each pair YaRN interpolates: 0 for fast pairs, 1 for slow ones, [dim / 2]."""
    low = max(math.floor(_pair_that_turns(rope, turns=rope.beta_fast, dim=dim)), 0)
    high = min(math.ceil(_pair_that_turns(rope, turns=rope.beta_slow, dim=dim)), dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _pair_that_turns(rope: RopeConfig, *, turns: float, dim: int) -> float:
    """Index of the pair that makes `turns` full turns within the original context."""
    assert rope.original_max_position_embeddings is not None
    wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))


def _magnitude(rope: RopeConfig) -> float:
    assert rope.factor is not None
    if rope.mscale and rope.mscale_all_dim:
        of_table = yarn_mscale(rope.factor, rope.mscale)
        return of_table / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)

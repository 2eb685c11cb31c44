"""`Rope`: rotary position embedding with optional YaRN (arXiv 2104.09864, 2309.00071).

Owns the frequencies and their tables; the kernels' `plain.rotate` applies them. DeepSeek stores
rotary dimensions as interleaved pairs; rotation returns all first elements, then all second ones.
Queries and keys are permuted the same way, so scores do not change.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from equipoise_model.config import ModelConfig, RopeConfig, yarn_mscale

Array = npt.NDArray[np.float32]


class Rope(nn.Module):
    """Tables of cosines and sines for every position up to `max_position_embeddings`.

    A table lookup is exact, so a token's rotation does not depend on its batch.
    """

    cos_PF: Tensor
    sin_PF: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inv_freq_F, factor = frequencies(config.rope, dim=config.qk_rope_head_dim)
        positions_P = np.arange(config.max_position_embeddings, dtype=np.float32)
        angles_PF = positions_P[:, None] * inv_freq_F
        for name, table_PF in (("cos_PF", np.cos(angles_PF)), ("sin_PF", np.sin(angles_PF))):
            self.register_buffer(name, torch.tensor(table_PF * factor), persistent=False)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [T, F] each, of int64 positions."""
        positions_T = positions_T.to(self.cos_PF.device)
        return self.cos_PF[positions_T], self.sin_PF[positions_T]


def frequencies(rope: RopeConfig, *, dim: int) -> tuple[Array, np.float32]:
    """Return each pair's angular frequency, float32 [dim / 2], and the tables' common factor."""
    exponents_F = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    wavelengths_F: Array = np.float32(rope.rope_theta) ** exponents_F
    inv_freq_F: Array = np.float32(1) / wavelengths_F
    if rope.factor is None:
        return inv_freq_F, np.float32(1)
    stretched_F: Array = inv_freq_F / np.float32(rope.factor)
    share_F = _stretched_share(rope, dim=dim)
    mixed_F: Array = stretched_F * share_F + inv_freq_F * (np.float32(1) - share_F)
    return mixed_F, np.float32(_magnitude(rope))


def _stretched_share(rope: RopeConfig, *, dim: int) -> Array:
    """How far YaRN interpolates each pair, [dim / 2]: 0 for fast pairs, 1 for slow ones."""
    low = max(math.floor(_pair_that_turns(rope, turns=rope.beta_fast, dim=dim)), 0)
    high = min(math.ceil(_pair_that_turns(rope, turns=rope.beta_slow, dim=dim)), dim - 1)
    width = high - low if high != low else 0.001
    ramp_F: Array = (np.arange(dim // 2, dtype=np.float32) - low) / np.float32(width)
    return ramp_F.clip(0, 1)


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

"""The paged cache of latents, in the kernels' format.

Contract: a layer's cache consists of blocks with a fixed number of positions (a power of two), and
a latent per position: R compressed numbers, then P rotated ones. Either one tensor [blocks,
positions, R + P] of bfloat16 or float32, or in FP8: codes [blocks, positions, R] with a float32
scale for each 128 of them, and the rotated numbers in bfloat16, because they carry the position.

A sequence's table lists the blocks of its positions, int32 [.., blocks of a sequence].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import CODE, GROUP, require

_ROTARY_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainLatents:
    """Unquantised latents: bfloat16 or float32 [blocks, positions, R + P].

    Raises:
        KernelInputError: the tensor or `rank` violates the contract.
    """

    latents_BPC: Tensor
    rank: int

    def __post_init__(self) -> None:
        require("latents", self.latents_BPC, torch.bfloat16, torch.float32)
        _require_blocks("latents", self.latents_BPC)
        _require_widths(self.rank, self.latents_BPC.shape[-1] - self.rank)

    @property
    def block_tokens(self) -> int:
        """Positions per block."""
        return self.latents_BPC.shape[1]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.latents_BPC.shape[0]

    @property
    def rotary(self) -> int:
        """P: rotated numbers per latent."""
        return self.latents_BPC.shape[2] - self.rank

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        return self.latents_BPC.device

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compressed numbers, their scales (here the same tensor again), rotated numbers."""
        compressed, rotary = self.latents_BPC.split([self.rank, self.rotary], dim=-1)
        return compressed, compressed, rotary

    def at(self, places_N: Tensor) -> Tensor:
        """Copy the latents at places, counted in positions from block 0: [N, R + P]."""
        return self.latents_BPC.flatten(0, 1)[places_N]

    def values(self) -> Tensor:
        """float32 [blocks, positions, R + P]."""
        return self.latents_BPC.float()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedLatents:
    """Latents in FP8: 656 bytes per position with R = 512 and P = 64, instead of 1152 in bfloat16.

    Raises:
        KernelInputError: the tensors break the contract.
    """

    codes_BPR: Tensor
    scales_BPG: Tensor
    rotary_BPP: Tensor

    def __post_init__(self) -> None:
        require("codes", self.codes_BPR, CODE)
        require("scales", self.scales_BPG, torch.float32)
        require("rotary", self.rotary_BPP, torch.bfloat16)
        for name, tensor in (("codes", self.codes_BPR), ("scales", self.scales_BPG),
                             ("rotary", self.rotary_BPP)):  # fmt: skip
            _require_blocks(name, tensor)
            require(name, tensor[..., 0], shape=self.codes_BPR.shape[:2])
            require(name, tensor, like=self.codes_BPR)
        _require_widths(self.rank, self.rotary)
        if self.rank % GROUP != 0:
            raise KernelInputError(f"codes must be multiples of {GROUP}, not {self.rank}")
        require("scales", self.scales_BPG, shape=(*self.codes_BPR.shape[:2], self.rank // GROUP))

    @property
    def block_tokens(self) -> int:
        """Positions per block."""
        return self.codes_BPR.shape[1]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.codes_BPR.shape[0]

    @property
    def rank(self) -> int:
        """R: compressed numbers per latent."""
        return self.codes_BPR.shape[2]

    @property
    def rotary(self) -> int:
        """P: rotated numbers per latent."""
        return self.rotary_BPP.shape[2]

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        return self.codes_BPR.device

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, their scales, rotated numbers."""
        return self.codes_BPR, self.scales_BPG, self.rotary_BPP

    def at(self, places_N: Tensor) -> Tensor:
        """Copy the latents at places, counted in positions from block 0: bfloat16 [N, R + P]."""
        # Gathers bytes, because torch does not gather FP8 on every device.
        codes_NR = self.codes_BPR.view(torch.uint8).flatten(0, 1)[places_N].view(CODE)
        scales_NG, rotary_NP = (
            part.flatten(0, 1)[places_N] for part in (self.scales_BPG, self.rotary_BPP)
        )
        return _dequantized(codes_NR, scales_NG, rotary_NP)

    def values(self) -> Tensor:
        """float32 [blocks, positions, R + P]; codes times scales are rounded to bfloat16."""
        return _dequantized(self.codes_BPR, self.scales_BPG, self.rotary_BPP).float()


Latents = PlainLatents | QuantizedLatents


def _dequantized(codes: Tensor, scales: Tensor, rotary: Tensor) -> Tensor:
    compressed = codes.float() * scales.repeat_interleave(GROUP, dim=-1)
    return torch.cat([compressed.bfloat16(), rotary], dim=-1)


def _require_blocks(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 3 or tensor.shape[0] == 0:
        raise KernelInputError(f"{name} must be [blocks, positions, ..], not {list(tensor.shape)}")
    positions = tensor.shape[1]
    if positions == 0 or positions & (positions - 1):
        raise KernelInputError(f"a block must have a power of two of positions, not {positions}")
    require(name, tensor, dense=True)


def _require_widths(rank: int, rotary: int) -> None:
    for name, width in (("compressed", rank), ("rotated", rotary)):
        if width < _ROTARY_MULTIPLE or width & (width - 1):
            raise KernelInputError(
                f"latents must have a power of two of {name} numbers, at least "
                f"{_ROTARY_MULTIPLE}, not {width}"
            )

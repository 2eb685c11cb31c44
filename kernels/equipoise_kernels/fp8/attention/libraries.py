"""Attention to latents by libraries, if installed: FlashMLA and FlashInfer.

Translates `mla_decode`'s contract to theirs. The libraries do not check tables and lengths, so both
are clamped first, on the device, and the contract's results for invalid queries are written over
theirs.

A library is offered only if it is installed, the device is a Hopper GPU and the self-test passed,
and FlashInfer only if named in the settings; see `selection`. Calls match the signatures and
assertions of FlashMLA 1.0.0 (commit 9241ae3) and FlashInfer 0.6.18 (commit fb28d72).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.attention.latents import Latents, PlainLatents
from equipoise_kernels.fp8.attention.mla_merge import AttentionOutput

FLASH_MLA, FLASHINFER = "flash_mla", "flashinfer"

FLASH_MLA_BLOCK = 64
"""Positions per block, the only number that FlashMLA supports."""

FLASH_MLA_PROGRAMS = 132
"""Most programs among which FlashMLA divides a call: the multiprocessors of a Hopper GPU."""

# Both are compiled for DeepSeek's latents.
_RANK, _ROTARY = 512, 64
_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The properties of a latent cache that libraries restrict."""

    rank: int
    """Compressed numbers per latent."""
    rotary: int
    """Rotated numbers per latent."""
    block_tokens: int
    """Positions per block."""
    quantized: bool
    """Whether latents are in FP8."""


def misfit(backend: str, shape: LatentShape) -> str | None:
    """Return why a backend cannot attend to such latents, or None; only libraries have limits."""
    if backend not in (FLASH_MLA, FLASHINFER):
        return None
    if (shape.rank, shape.rotary) != (_RANK, _ROTARY):
        return f"it is compiled for {_RANK} + {_ROTARY} numbers, not {shape.rank} + {shape.rotary}"
    if shape.quantized:
        return "it has no latents in FP8 whose rotated numbers are bfloat16"
    if backend == FLASH_MLA and shape.block_tokens != FLASH_MLA_BLOCK:
        return f"it takes blocks of {FLASH_MLA_BLOCK} positions, not {shape.block_tokens}"
    return None


def mla_decode_flash_mla(
    query_BHC: Tensor,
    latents: Latents,
    *,
    tables_BS: Tensor,
    lengths_B: Tensor,
    scale: float,
    tokens_per_split: int | None,
    out: AttentionOutput,
) -> None:
    """Attend with FlashMLA's dense kernel, which plans on the device and so can be captured."""
    cache_BPC = _checked(FLASH_MLA, query_BHC, latents, tokens_per_split=tokens_per_split)
    num_queries, num_heads, _ = query_BHC.shape
    if num_queries == 0:
        return
    library = importlib.import_module(FLASH_MLA)
    asked = _SafeQuery.of(latents, tables_BS=tables_BS, lengths_B=lengths_B)
    # Planned again for each call, because it depends on the lengths; releases before 1.0 need all
    # arguments.
    plan, splits = library.get_mla_metadata(asked.lengths_B, num_heads, 1)
    out_BQHR, lse_BHQ = library.flash_mla_with_kvcache(
        query_BHC.contiguous().unsqueeze(1),
        cache_BPC.unsqueeze(2),
        asked.tables_BS,
        asked.lengths_B,
        latents.rank,
        plan,
        splits,
        softmax_scale=scale,
    )
    asked.answer(out_BQHR.squeeze(1), lse_BHQ.squeeze(2), out=out)


def mla_decode_flashinfer(
    query_BHC: Tensor,
    latents: Latents,
    *,
    tables_BS: Tensor,
    lengths_B: Tensor,
    scale: float,
    tokens_per_split: int | None,
    out: AttentionOutput,
) -> None:
    """Attend with FlashInfer's paged kernel, which plans on the host and waits for the device."""
    _checked(FLASHINFER, query_BHC, latents, tokens_per_split=tokens_per_split)
    num_queries, num_heads, _ = query_BHC.shape
    if num_queries == 0:
        return
    asked = _SafeQuery.of(latents, tables_BS=tables_BS, lengths_B=lengths_B)
    blocks_B = (asked.lengths_B + latents.block_tokens - 1) // latents.block_tokens
    places_S = torch.arange(tables_BS.shape[1], device=tables_BS.device)
    wrapper = _flashinfer_wrapper(query_BHC.device)
    wrapper.plan(
        torch.arange(num_queries + 1, dtype=torch.int32, device=tables_BS.device),
        torch.nn.functional.pad(blocks_B.cumsum(0, dtype=torch.int32), (1, 0)),
        asked.tables_BS[places_S < blocks_B.unsqueeze(1)],
        asked.lengths_B,
        num_heads,
        latents.rank,
        latents.rotary,
        latents.block_tokens,
        False,  # not causal: a query sees all positions of its length
        scale,
        query_BHC.dtype,
        query_BHC.dtype,
    )
    compressed, _, rotary = latents.parts
    plain_BHR, rotary_BHP = query_BHC.split([latents.rank, latents.rotary], dim=-1)
    # Logarithms are to the base 2 by default; newer releases can return natural ones.
    out_BHR, lse_BH = wrapper.run(plain_BHR, rotary_BHP, compressed, rotary, return_lse=True)
    asked.answer(out_BHR, lse_BH * math.log(2), out=out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SafeQuery:
    """Tables and lengths that are safe for any kernel, and the queries whose results to replace.

    A block outside the cache is replaced by one inside; a query that sees nothing sees one
    position.
    """

    tables_BS: Tensor
    lengths_B: Tensor
    is_lost_B: Tensor
    """Queries with a block outside the cache or a length beyond the table; their results are
    NaN."""
    is_empty_B: Tensor
    """Queries that see nothing."""

    @classmethod
    def of(cls, latents: Latents, *, tables_BS: Tensor, lengths_B: Tensor) -> _SafeQuery:
        """Clamp tables and lengths, without waiting for the device."""
        capacity = tables_BS.shape[1] * latents.block_tokens
        starts_S = torch.arange(0, capacity, latents.block_tokens, device=tables_BS.device)
        is_used_BS = starts_S < lengths_B.unsqueeze(1)
        is_unknown_BS = (tables_BS < 0) | (tables_BS >= latents.num_blocks)
        return cls(
            tables_BS=tables_BS.clamp(0, latents.num_blocks - 1),
            lengths_B=lengths_B.clamp(1, capacity),
            is_lost_B=(is_used_BS & is_unknown_BS).any(dim=1) | (lengths_B > capacity),
            is_empty_B=lengths_B <= 0,
        )

    def answer(self, result_BHR: Tensor, lse_BH: Tensor, *, out: AttentionOutput) -> None:
        """Copy a kernel's results, and write the contract's for invalid queries."""
        lost_B11, empty_B11 = self.is_lost_B[:, None, None], self.is_empty_B[:, None, None]
        nan = float("nan")
        out.out_BHR.copy_(result_BHR.masked_fill(empty_B11, 0.0).masked_fill(lost_B11, nan))
        lse_BH = lse_BH.masked_fill(empty_B11[..., 0], float("-inf"))
        out.lse_BH.copy_(lse_BH.masked_fill(lost_B11[..., 0], nan))


def _checked(
    backend: str, query_BHC: Tensor, latents: Latents, *, tokens_per_split: int | None
) -> Tensor:
    """Return the cache [blocks, positions, R + P], or raise KernelInputError."""
    shape = LatentShape(
        rank=latents.rank,
        rotary=latents.rotary,
        block_tokens=latents.block_tokens,
        quantized=not isinstance(latents, PlainLatents),
    )
    reason = misfit(backend, shape)
    if query_BHC.dtype != torch.bfloat16:
        reason = f"it computes in bfloat16, not {query_BHC.dtype}"
    if tokens_per_split is not None:
        reason = "it splits positions by all that it is batched with, not by tokens_per_split"
    if reason:
        raise KernelInputError(f"{backend} cannot attend here, because {reason}: choose triton")
    assert isinstance(latents, PlainLatents)
    return latents.latents_BPC


@cache
def _flashinfer_wrapper(device: torch.device) -> Any:
    """FlashInfer's planner with its workspaces, which are pinned and large: one per device."""
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace)

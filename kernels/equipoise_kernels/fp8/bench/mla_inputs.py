"""Queries and paged latents of DeepSeek-V3's size, for the benchmark and for tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.fp8.attention.latents import PlainLatents
from equipoise_kernels.fp8.attention.mla_decode import MlaDecodeConfig, mla_decode_triton
from equipoise_kernels.fp8.attention.mla_merge import AttentionOutput
from equipoise_kernels.fp8.bench.bench import num_copies
from equipoise_kernels.fp8.bench.timing import TimedCall

HEADS = 128
RANK = 512
ROTARY = 64
BLOCK_TOKENS = 64
# Width of the scores before the up-projection was absorbed: 128 + 64.
_SCALE = 192**-0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlaInputs:
    """Inputs of `mla_decode`, with several caches; each call uses one."""

    query_BHC: Tensor
    """Absorbed queries."""
    caches: Sequence[PlainLatents]
    """Shuffled blocks; positions that no query sees are NaN."""
    tables_BS: Tensor
    """Blocks of each query's sequence."""
    lengths: Sequence[int]
    """Positions that each query sees."""
    outs: Sequence[AttentionOutput]
    """Poisoned outputs, one per cache."""

    @property
    def flop(self) -> int:
        """Operations of both products over the visible positions."""
        _, num_heads, width = self.query_BHC.shape
        return 2 * sum(self.lengths) * num_heads * (width + self.caches[0].rank)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the visible latents, each once."""
        return sum(self.lengths) * self.query_BHC.shape[2] * self.query_BHC.element_size()

    def calls(self, config: MlaDecodeConfig | None = None) -> list[TimedCall]:
        """One launch per cache."""
        lengths_B = torch.tensor(self.lengths, dtype=torch.int32, device=self.query_BHC.device)
        return [
            lambda cache=cache, out=out: mla_decode_triton(  # type: ignore[misc]
                self.query_BHC,
                cache,
                tables_BS=self.tables_BS,
                lengths_B=lengths_B,
                scale=_SCALE,
                tokens_per_split=None,
                out=out,
                config=config,
            )
            for cache, out in zip(self.caches, self.outs, strict=True)
        ]

    def exact(self, place: int) -> tuple[Tensor, Tensor]:
        """Float64 outputs [B, H, R] and sums [B, H] of the call on one cache, query by query."""
        cache, outs, sums = self.caches[place], [], []
        for query_HC, table_S, length in zip(
            self.query_BHC, self.tables_BS, self.lengths, strict=True
        ):
            seen_LC = cache.latents_BPC[table_S.long()].flatten(0, 1)[:length].double()
            scores_HL = query_HC.double() @ seen_LC.T * _SCALE
            outs.append(scores_HL.softmax(dim=-1) @ seen_LC[:, : cache.rank])
            sums.append(scores_HL.logsumexp(dim=-1))
        return torch.stack(outs), torch.stack(sums)


def mla_inputs(
    lengths: Sequence[int],
    generator: torch.Generator,
    *,
    num_heads: int = HEADS,
    rank: int = RANK,
    rotary: int = ROTARY,
) -> MlaInputs:
    """Random queries, with latents in shuffled blocks."""
    device, num_queries = generator.device, len(lengths)
    table_size = -(-max(lengths) // BLOCK_TOKENS)
    num_blocks = num_queries * table_size
    tables_BS = torch.randperm(num_blocks, generator=generator, device=device)
    tables_BS = tables_BS.to(torch.int32).view(num_queries, table_size)
    positions_L = torch.arange(table_size * BLOCK_TOKENS, device=device)
    unseen_BL = positions_L >= torch.tensor(lengths, device=device).unsqueeze(1)
    width = rank + rotary
    query_BHC = torch.randn(num_queries, num_heads, width, generator=generator, device=device)
    caches = []
    for _ in range(num_copies(2 * sum(lengths) * width)):
        latents_BPC = torch.randn(
            num_blocks, BLOCK_TOKENS, width, generator=generator, device=device
        ).bfloat16()
        unseen = unseen_BL.view(num_blocks, BLOCK_TOKENS)
        owned = latents_BPC[tables_BS.flatten().long()]
        latents_BPC[tables_BS.flatten().long()] = owned.masked_fill(
            unseen.unsqueeze(2), float("nan")
        )
        caches.append(PlainLatents(latents_BPC=latents_BPC, rank=rank))
    return MlaInputs(
        query_BHC=query_BHC.bfloat16(),
        caches=caches,
        tables_BS=tables_BS,
        lengths=tuple(lengths),
        outs=[_poisoned(query_BHC.bfloat16(), rank) for _ in caches],
    )


def _poisoned(query_BHC: Tensor, rank: int) -> AttentionOutput:
    num_queries, num_heads, _ = query_BHC.shape
    nothing = float("nan")
    return AttentionOutput(
        out_BHR=query_BHC.new_full((num_queries, num_heads, rank), nothing),
        lse_BH=query_BHC.new_full((num_queries, num_heads), nothing, dtype=torch.float32),
    )

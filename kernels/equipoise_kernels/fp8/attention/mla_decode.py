"""Attention of single queries to paged latents (multi-head latent attention, absorbed).

Contract: queries [B, H, R + P] of bfloat16 or float32 with contiguous columns, with the key's
up-projection absorbed and the last P rotated; B may be 0. Query b sees positions 0 to lengths[b] -
1 of the blocks in its table, int32 [B, S]. With c the latents (`attention.latents`):

    s      = scale * <query, c>                     lse = log(sum over positions of exp(s))
    out    = sum over positions of exp(s - lse) * (the first R of c)

out has the queries' dtype, [B, H, R], lse is float32 [B, H] (natural logarithm). A query that sees
nothing gets zeros and minus infinity. A block outside the cache, or a length beyond the table,
makes the query's outputs NaN: nothing is read out of bounds, and the error shows.

Split-KV: a program processes `tokens_per_split` positions of a query, and a second kernel merges
the results in the order of positions. Splits depend on `tokens_per_split` alone, and a program sees
only one query, so results do not depend on the batch if that number is given. Libraries split in
their own ways, and reject that number.

Sums are float32. The kernel rounds weights to the latents' dtype for the second product (bfloat16
for FP8); the twin does not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import GROUP, require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.attention import libraries
from equipoise_kernels.fp8.attention.latents import Latents, QuantizedLatents
from equipoise_kernels.fp8.attention.mla_decode_kernel import mla_decode_kernel
from equipoise_kernels.fp8.attention.mla_merge import (
    AttentionOutput,
    merge_specialization,
    merge_splits,
)
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

# Products of 64 heads fill a warp group. Those of a few take less time than reading latents.
_WIDE_HEADS = 64
_FEW_HEADS = 16
# Its sums take half of all registers: addresses that every step adds to may be on the stack.
_MAX_STACK_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaDecodeConfig:
    """Work of a program."""

    heads: int
    """Heads per program."""
    tokens: int
    """Positions per step of the loop."""
    tokens_per_split: int
    """Positions per split."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Depth of the software pipeline."""


CONFIG_SPACE = tuple(
    MlaDecodeConfig(
        heads=heads,
        tokens=tokens,
        tokens_per_split=tokens_per_split,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    for heads, tokens, num_warps, num_stages in (
        *((_FEW_HEADS, 32, 4, stages) for stages in (3, 5)),
        *((_FEW_HEADS, 64, 4, stages) for stages in (3,)),
        (_WIDE_HEADS, 32, 8, 4),
        (_WIDE_HEADS, 64, 8, 2),
    )
    for tokens_per_split in (256, 512, 1024, 2048, 4096, 8192)
)


def mla_decode(
    query_BHC: Tensor,
    latents: Latents,
    *,
    tables_BS: Tensor,
    lengths_B: Tensor,
    scale: float,
    tokens_per_split: int | None = None,
    out: AttentionOutput | None = None,
) -> AttentionOutput:
    """Attend with the backend selected for this process.

    Args:
        query_BHC: absorbed queries.
        latents: one layer's cache.
        tables_BS: blocks of each query's sequence; entries beyond its length are arbitrary.
        lengths_B: positions that each query sees, int32.
        scale: factor of the scores.
        tokens_per_split: positions per split, a multiple of 64; by default as tuned for the number
            of queries.
        out: where to write; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("query", query_BHC, torch.bfloat16, torch.float32)
    if query_BHC.dim() != 3 or query_BHC.shape[1] == 0:
        raise KernelInputError(f"query must be [B, H, C], not {list(query_BHC.shape)}")
    num_queries, num_heads, _ = query_BHC.shape
    width = latents.rank + latents.rotary
    require("query", query_BHC, shape=(num_queries, num_heads, width), dense=True)
    require("tables", tables_BS, torch.int32)
    if tables_BS.dim() != 2 or tables_BS.shape[1] == 0:
        raise KernelInputError(f"tables must be [B, S], not {list(tables_BS.shape)}")
    if tokens_per_split is not None and (tokens_per_split < 64 or tokens_per_split % 64 != 0):
        raise KernelInputError(f"tokens_per_split must be a multiple of 64, not {tokens_per_split}")
    out = out or AttentionOutput(
        out_BHR=query_BHC.new_empty(num_queries, num_heads, latents.rank),
        lse_BH=query_BHC.new_empty(num_queries, num_heads, dtype=torch.float32),
    )
    for name, tensor, dtype, shape in (
        ("tables", tables_BS, torch.int32, (num_queries, tables_BS.shape[1])),
        ("lengths", lengths_B, torch.int32, (num_queries,)),
        ("out", out.out_BHR, query_BHC.dtype, (num_queries, num_heads, latents.rank)),
        ("lse", out.lse_BH, torch.float32, (num_queries, num_heads)),
    ):
        require(name, tensor, dtype, shape=shape, contiguous=True, like=query_BHC)
    if latents.device != query_BHC.device:
        raise KernelInputError(f"latents are on {latents.device}, queries elsewhere: move them")
    MLA_DECODE.on(query_BHC.device)(
        query_BHC,
        latents,
        tables_BS=tables_BS,
        lengths_B=lengths_B,
        scale=scale,
        tokens_per_split=tokens_per_split,
        out=out,
    )
    return out


def mla_decode_reference(
    query_BHC: Tensor,
    latents: Latents,
    *,
    tables_BS: Tensor,
    lengths_B: Tensor,
    scale: float,
    tokens_per_split: int | None,
    out: AttentionOutput,
) -> None:
    """The torch twin: float32, all positions of a query at once."""
    del tokens_per_split
    block_tokens, capacity = latents.block_tokens, tables_BS.shape[1] * latents.block_tokens
    values = latents.values()
    for query, (table_S, length) in enumerate(
        zip(tables_BS.tolist(), lengths_B.tolist(), strict=True)
    ):
        used = table_S[: -(-max(length, 0) // block_tokens)]
        if length > capacity or any(not 0 <= block < latents.num_blocks for block in used):
            out.out_BHR[query], out.lse_BH[query] = float("nan"), float("nan")
            continue
        seen_LC = values[used].flatten(0, 1)[: max(length, 0)]
        scores_HL = query_BHC[query].float() @ seen_LC.T * scale
        lse_H = scores_HL.logsumexp(dim=-1)
        weights_HL = (scores_HL - lse_H.unsqueeze(1)).exp()
        out.out_BHR[query] = (weights_HL @ seen_LC[:, : latents.rank]).to(out.out_BHR.dtype)
        out.lse_BH[query] = lse_H


def mla_decode_triton(
    query_BHC: Tensor,
    latents: Latents,
    *,
    tables_BS: Tensor,
    lengths_B: Tensor,
    scale: float,
    tokens_per_split: int | None,
    out: AttentionOutput,
    config: MlaDecodeConfig | None = None,
) -> None:
    """Launch the kernels, with the committed configuration of this device by default."""
    num_queries, num_heads, _ = query_BHC.shape
    if num_queries == 0:
        return
    config = config or MLA_DECODE.config(rows=num_queries, shape=_tuned_for(num_heads))
    per_split = tokens_per_split or config.tokens_per_split
    num_splits = -(-tables_BS.shape[1] * latents.block_tokens // per_split)
    partial = out
    if num_splits > 1:
        partial = AttentionOutput(
            out_BHR=query_BHC.new_empty(
                num_queries * num_splits, num_heads, latents.rank, dtype=torch.float32
            ),
            lse_BH=query_BHC.new_empty(num_queries * num_splits, num_heads, dtype=torch.float32),
        )
    compressed, scales, rotary = latents.parts
    mla_decode_kernel[(-(-num_heads // config.heads), num_queries, num_splits)](
        query_BHC,
        compressed,
        scales,
        rotary,
        tables_BS,
        lengths_B,
        partial.out_BHR,
        partial.lse_BH,
        scale,
        latents.num_blocks,
        num_heads,
        tables_BS.shape[1],
        per_split,
        query_BHC.stride(0),
        query_BHC.stride(1),
        compressed.stride(0),
        scales.stride(0),
        rotary.stride(0),
        TOKEN_STRIDE=compressed.stride(1),
        SCALE_STRIDE=scales.stride(1),
        ROTARY_STRIDE=rotary.stride(1),
        QUANTIZED=isinstance(latents, QuantizedLatents),
        RANK=latents.rank,
        ROTARY=latents.rotary,
        BLOCK_TOKENS=latents.block_tokens,
        HAS_WIDE_PRODUCTS=config.heads >= _WIDE_HEADS,
        **configurations.options(config),
    )
    if num_splits > 1:
        merge_splits(partial, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSize:
    """Positions per split that are tuned for a number of queries."""

    max_queries: int | None
    """Most queries; None for any more."""
    positions: int
    """Positions, on the device where they are fewest."""


@cache
def split_sizes(num_heads: int) -> tuple[SplitSize, ...]:
    """Positions per split by the number of queries, ascending, of all devices' configurations."""
    shape = _tuned_for(num_heads)
    files = configurations.committed(MLA_DECODE.name).values()
    limits = {one.max_rows for entries in files for one in entries if one.max_rows is not None}
    return tuple(
        SplitSize(
            max_queries=limit,
            positions=min(
                next(
                    one.config["tokens_per_split"]
                    for one in entries
                    if one.fits(sys.maxsize if limit is None else limit, shape)
                )
                for entries in files
            ),
        )
        for limit in (*sorted(limits), None)
    )


def most_partial_results(num_queries: int, *, num_heads: int, num_positions: int) -> int:
    """Most results of splits that a call with up to so many queries has, whatever its backend.

    Each is float32 [H, R] with a logarithm per head. Triton has none if one split is enough;
    FlashMLA has one for every query and every program in any case.
    """
    most = num_queries + libraries.FLASH_MLA_PROGRAMS
    for size in split_sizes(num_heads):
        num_splits = -(-num_positions // size.positions)
        if num_splits > 1:
            most = max(most, min(num_queries, size.max_queries or num_queries) * num_splits)
    return most


def _tuned_for(num_heads: int) -> tuple[int, ...]:
    """The shape of which configurations depend on."""
    return (_FEW_HEADS if num_heads <= _FEW_HEADS else _WIDE_HEADS,)


def specializations(
    config: MlaDecodeConfig, *, rank: int, rotary: int, block_tokens: int
) -> list[Specialization]:
    """Specialisations of a configuration: both kinds of latents, several splits, the merge."""
    decode = [
        Specialization(
            kernel=mla_decode_kernel,
            name=f"mla_decode {config.heads}x{config.tokens} warps={config.num_warps} "
            f"stages={config.num_stages} quantized={quantized}",
            types={
                "query_ptr rotary_ptr": "*bf16",
                "compressed_ptr": "*fp8e4nv" if quantized else "*bf16",
                "scales_ptr": "*fp32" if quantized else "*bf16",
                "tables_ptr lengths_ptr": "*i32",
                "out_ptr lse_ptr": "*fp32",
                "scale": "fp32",
            },
            multiples_of_16="tokens_per_split query_stride head_stride block_stride "
            "rotary_block_stride scale_block_stride",
            options=configurations.options(config)
            | {
                "TOKEN_STRIDE": rank if quantized else rank + rotary,
                "SCALE_STRIDE": rank // GROUP if quantized else rank + rotary,
                "ROTARY_STRIDE": rotary if quantized else rank + rotary,
                "QUANTIZED": quantized,
                "RANK": rank,
                "ROTARY": rotary,
                "BLOCK_TOKENS": block_tokens,
                "HAS_WIDE_PRODUCTS": config.heads >= _WIDE_HEADS,
            },
            # FP8 latents of a few heads wait for their scales, which Triton does not prefetch.
            is_product=config.heads >= _WIDE_HEADS or not quantized,
            has_wide_products=config.heads >= _WIDE_HEADS,
            max_stack_share=_MAX_STACK_SHARE,
        )
        for quantized in (False, True)
    ]
    return [*decode, merge_specialization(rank)]


MLA_DECODE = KernelOperation(
    name="mla_decode",
    backends={
        "reference": mla_decode_reference,
        "triton": mla_decode_triton,
        libraries.FLASH_MLA: libraries.mla_decode_flash_mla,
        libraries.FLASHINFER: libraries.mla_decode_flashinfer,
    },
    configs=CONFIG_SPACE,
    specializations=specializations,
)

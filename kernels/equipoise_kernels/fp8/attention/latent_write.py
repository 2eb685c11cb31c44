"""Writes new tokens' latents to the paged cache, normed and rotated, and rotates their queries.

Contract: raw latents [T, R + P] of bfloat16 or float32 with contiguous columns, as the projection
makes them: R compressed numbers, then P to rotate; T may be 0. Token t goes to `places[t]`, int64,
counted in positions from the start of block 0 (`attention.latents`):

    compressed = rms_norm(the first R)       quantised as by `group_quant` for an FP8 cache
    rotary     = rotate(the last P)          pairs (x0, x1), .. become all firsts, then all seconds

Queries [T, H, P], the part of each head to rotate, are rotated by the same angles. `cos` and `sin`
are float32 [T, P / 2], rows of the model's tables, which include YaRN's frequencies and factor.
Outputs are rounded as `rms_norm` and `rotate` do, and must not overlap inputs.

A token with place -1 is padding and is not written. Any other place outside the cache is not
written either, and makes the token's queries NaN, so that the error shows. If two tokens have one
place, either may win; other places keep their contents.

Backends agree exactly on rotations, and on norms up to the order in which squares are summed
(float32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import GROUP, QuantizedRows, ScaleFormat, empty_rows, require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.attention.latents import Latents, PlainLatents, QuantizedLatents
from equipoise_kernels.fp8.jit import constant, jit, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.quant.group_quant import quantized, write_quantized
from equipoise_kernels.fp8.specialization import Specialization
from equipoise_kernels.plain.rms_norm import rms_norm
from equipoise_kernels.plain.rotate import rotate

_GROUP = constant(GROUP)
_PADDING = constant(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWriteConfig:
    """Work of a program; a token's latent has a program of its own."""

    heads: int
    """Heads that a program rotates."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    LatentWriteConfig(heads=heads, num_warps=num_warps)
    for heads in (16, 32, 64)
    for num_warps in (1, 2, 4)
)


def latent_write(
    raw_TC: Tensor,
    query_THP: Tensor,
    latents: Latents,
    *,
    places_T: Tensor,
    weight_R: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    out_THP: Tensor | None = None,
) -> Tensor:
    """Write latents and rotate queries with the backend selected for this process.

    Args:
        raw_TC: latents before norm and rotation.
        query_THP: the queries' part to rotate, of the same dtype; may be a view of whole queries.
        latents: one layer's cache, written to; of the raw latents' dtype unless in FP8.
        places_T: where to store each token.
        weight_R: the norm's factors, of the raw latents' dtype.
        eps: added to the norm's mean square.
        cos_TF: cosine of each pair's angle.
        sin_TF: its sine.
        out_THP: where to write rotated queries, such as the last columns of the absorbed ones;
            allocated by default.

    Returns:
        Rotated queries [T, H, P].

    Raises:
        KernelInputError: the arguments break the contract.
    """
    if query_THP.dim() != 3 or query_THP.shape[1] == 0:
        raise KernelInputError(f"query must be [T, H, P], not {list(query_THP.shape)}")
    if out_THP is None:
        out_THP = query_THP.new_empty(query_THP.shape)
    _check_rows(
        {"raw": raw_TC, "query": query_THP, "out": out_THP, "cos": cos_TF, "sin": sin_TF}, latents
    )
    _check_vectors(raw_TC, latents, places_T=places_T, weight_R=weight_R)
    LATENT_WRITE.on(raw_TC.device)(
        raw_TC,
        query_THP,
        latents,
        places_T=places_T,
        weight_R=weight_R,
        eps=eps,
        cos_TF=cos_TF,
        sin_TF=sin_TF,
        out_THP=out_THP,
    )
    return out_THP


def latent_write_reference(
    raw_TC: Tensor,
    query_THP: Tensor,
    latents: Latents,
    *,
    places_T: Tensor,
    weight_R: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    out_THP: Tensor,
) -> None:
    """The torch twin."""
    exists_T = (places_T >= 0) & (places_T < latents.num_blocks * latents.block_tokens)
    is_lost_T11 = (~exists_T & (places_T != -1))[:, None, None]
    rotated_THP = rotate(query_THP, cos_TF.unsqueeze(1), sin_TF.unsqueeze(1))
    out_THP.copy_(rotated_THP.masked_fill(is_lost_T11, float("nan")))

    raw_NC = raw_TC[exists_T]
    where = places_T[exists_T] // latents.block_tokens, places_T[exists_T] % latents.block_tokens
    normed_NR = rms_norm(raw_NC[:, : latents.rank].contiguous(), weight_R, eps, row_block=None)
    compressed, scales, rotary = latents.parts
    if isinstance(latents, QuantizedLatents):
        rows = _quantized_rows(normed_NR)
        # Scatters bytes, because torch does not scatter FP8 on every device.
        compressed.view(torch.uint8)[where] = rows.codes.view(torch.uint8)
        scales[where] = rows.scales
    else:
        compressed[where] = normed_NR
    rotated_NP = rotate(raw_NC[:, latents.rank :], cos_TF[exists_T], sin_TF[exists_T])
    rotary[where] = rotated_NP.to(rotary.dtype)


def latent_write_triton(
    raw_TC: Tensor,
    query_THP: Tensor,
    latents: Latents,
    *,
    places_T: Tensor,
    weight_R: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    out_THP: Tensor,
    config: LatentWriteConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_tokens, num_heads, _ = query_THP.shape
    if num_tokens == 0:
        return
    config = config or LATENT_WRITE.config(rows=num_tokens)
    compressed, scales, rotary = latents.parts
    latent_write_kernel[(num_tokens, 1 + -(-num_heads // config.heads))](
        raw_TC,
        query_THP,
        places_T,
        weight_R,
        cos_TF,
        sin_TF,
        compressed,
        scales,
        rotary,
        out_THP,
        eps,
        latents.num_blocks * latents.block_tokens,
        num_heads,
        raw_TC.stride(0),
        query_THP.stride(0),
        query_THP.stride(1),
        cos_TF.stride(0),
        sin_TF.stride(0),
        compressed.stride(0),
        compressed.stride(1),
        scales.stride(0),
        scales.stride(1),
        rotary.stride(0),
        rotary.stride(1),
        out_THP.stride(0),
        out_THP.stride(1),
        QUANTIZED=isinstance(latents, QuantizedLatents),
        RANK=latents.rank,
        ROTARY=latents.rotary,
        BLOCK_TOKENS=latents.block_tokens,
        **configurations.options(config),
        enable_fp_fusion=False,  # it would change bits
    )


@jit
def latent_write_kernel(
    raw_ptr: tl.tensor,
    query_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    compressed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: float,
    capacity: int,
    num_heads: int,
    raw_stride: int,
    query_stride: int,
    head_stride: int,
    cos_stride: int,
    sin_stride: int,
    block_stride: int,
    token_stride: int,
    scale_block_stride: int,
    scale_token_stride: int,
    rotary_block_stride: int,
    rotary_token_stride: int,
    out_stride: int,
    out_head_stride: int,
    QUANTIZED: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """A token's first program writes its latent; the others rotate some heads of its query."""
    token = tl.program_id(0).to(tl.int64)
    angles = tl.arange(0, ROTARY // 2)[None, :]
    cos = tl.load(cos_ptr + token * cos_stride + angles)
    sin = tl.load(sin_ptr + token * sin_stride + angles)
    place = tl.load(places_ptr + token)
    exists = (place >= 0) & (place < capacity)
    if tl.program_id(1) > 0:
        heads = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        has_head = heads < num_heads
        head_ptrs = query_ptr + token * query_stride + heads * head_stride
        first, second = _rotated(head_ptrs, has_head, cos, sin, ROTARY)
        is_lost = (exists == 0) & (place != _PADDING)
        first = tl.where(is_lost, float("nan"), first)
        second = tl.where(is_lost, float("nan"), second)
        out_ptrs = out_ptr + token * out_stride + heads * out_head_stride
        _store_halves(out_ptrs, has_head, first, second, ROTARY)
    elif exists:
        block, offset = place // BLOCK_TOKENS, place % BLOCK_TOKENS
        raw_ptrs = raw_ptr + token * raw_stride + tl.zeros([1, 1], tl.int64)
        first, second = _rotated(raw_ptrs + RANK, True, cos, sin, ROTARY)
        ptrs = rotary_ptr + block * rotary_block_stride + offset * rotary_token_stride
        _store_halves(ptrs + tl.zeros([1, 1], tl.int64), True, first, second, ROTARY)

        normed = _normed(raw_ptrs, weight_ptr, eps, RANK)
        ptrs = compressed_ptr + block * block_stride + offset * token_stride
        if QUANTIZED:
            codes, scales = quantized(tl.reshape(normed, [1, RANK // _GROUP, _GROUP]), False)
            tl.store(ptrs + tl.arange(0, RANK)[None, :], tl.reshape(codes, [1, RANK]))
            ptrs = scales_ptr + block * scale_block_stride + offset * scale_token_stride
            tl.store(ptrs + tl.arange(0, RANK // _GROUP)[None, :], scales)
        else:
            tl.store(ptrs + tl.arange(0, RANK)[None, :], normed.to(compressed_ptr.dtype.element_ty))


@jit
def _rotated(
    row_ptrs: tl.tensor, mask: tl.tensor, cos: tl.tensor, sin: tl.tensor, ROTARY: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """First and second halves [rows, P / 2] of the rotated rows at pointers [rows, 1]."""
    x = tl.load(row_ptrs + tl.arange(0, ROTARY)[None, :], mask=mask, other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(x, [x.shape[0], ROTARY // 2, 2]))
    return first * cos - second * sin, second * cos + first * sin


@jit
def _store_halves(
    row_ptrs: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    ROTARY: tl.constexpr,
) -> None:
    """Store first and second halves of rows, rounded to the pointers' dtype."""
    ptrs = row_ptrs + tl.arange(0, ROTARY // 2)[None, :]
    tl.store(ptrs, first.to(row_ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + ROTARY // 2, second.to(row_ptrs.dtype.element_ty), mask=mask)


@jit
def _normed(
    row_ptrs: tl.tensor, weight_ptr: tl.tensor, eps: float, RANK: tl.constexpr
) -> tl.tensor:
    """`rms_norm` of one row [1, R], with its roundings, in float32."""
    columns = tl.arange(0, RANK)[None, :]
    stored = tl.load(row_ptrs + columns)
    x = stored.to(tl.float32)
    mean = tl.sum(x * x, axis=1) * (1.0 / RANK)  # exact: a power of two
    norm = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    scaled = (x * norm[:, None]).to(stored.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    return (scaled * weight).to(stored.dtype).to(tl.float32)


def specializations(
    config: LatentWriteConfig, *, rank: int, rotary: int, block_tokens: int
) -> list[Specialization]:
    """Specialisations of a configuration: both kinds of latents."""
    scale_strides = " scale_block_stride scale_token_stride"
    return [
        Specialization(
            kernel=latent_write_kernel,
            name=f"latent_write {config} quantized={quantized}",
            types={
                "raw_ptr query_ptr weight_ptr rotary_ptr out_ptr": "*bf16",
                "places_ptr": "*i64",
                "cos_ptr sin_ptr": "*fp32",
                "compressed_ptr": "*fp8e4nv" if quantized else "*bf16",
                "scales_ptr": "*fp32" if quantized else "*bf16",
                "eps": "fp32",
            },
            multiples_of_16="raw_stride query_stride head_stride cos_stride sin_stride "
            "block_stride token_stride rotary_block_stride rotary_token_stride out_stride "
            "out_head_stride" + ("" if quantized else scale_strides),
            options=configurations.options(config)
            | {
                "QUANTIZED": quantized,
                "RANK": rank,
                "ROTARY": rotary,
                "BLOCK_TOKENS": block_tokens,
            },
            fuses_products=False,
        )
        for quantized in (False, True)
    ]


def _check_rows(rows: Mapping[str, Tensor], latents: Latents) -> None:
    """Raise KernelInputError unless the per-token tensors match each other."""
    raw, (num_tokens, num_heads, _) = rows["raw"], rows["query"].shape
    require("raw", raw, torch.bfloat16, torch.float32)
    heads = (num_tokens, num_heads, latents.rotary)
    angles = (num_tokens, latents.rotary // 2)
    for name, dtype, shape in (
        ("raw", raw.dtype, (num_tokens, latents.rank + latents.rotary)),
        ("query", raw.dtype, heads),
        ("out", raw.dtype, heads),
        ("cos", torch.float32, angles),
        ("sin", torch.float32, angles),
    ):
        require(name, rows[name], dtype, shape=shape, dense=True, like=raw)
    if isinstance(latents, PlainLatents):
        require("latents", latents.latents_BPC, raw.dtype)
    if latents.device != raw.device:
        raise KernelInputError(f"latents are on {latents.device}, the rest elsewhere: move them")


def _check_vectors(raw_TC: Tensor, latents: Latents, *, places_T: Tensor, weight_R: Tensor) -> None:
    """Raise KernelInputError unless the other tensors match the raw latents."""
    for name, tensor, dtype, size in (
        ("places", places_T, torch.int64, raw_TC.shape[0]),
        ("weight", weight_R, raw_TC.dtype, latents.rank),
    ):
        require(name, tensor, dtype, shape=(size,), contiguous=True, like=raw_TC)


def _quantized_rows(x_NR: Tensor) -> QuantizedRows:
    rows = empty_rows(x_NR.shape, device=x_NR.device)
    write_quantized(x_NR.float(), scale_format=ScaleFormat.FP32, out=rows)
    return rows


LATENT_WRITE = KernelOperation(
    name="latent_write",
    backends={"reference": latent_write_reference, "triton": latent_write_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)

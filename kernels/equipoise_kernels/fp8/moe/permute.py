"""Copies rows into slot order, and sums their outputs back, weighted.

Contract: `permute` copies row t to the places of its choices in a `RowOrder`; padding rows are not
written. For every row, `combine` computes

    y[t] = sum over k of weights[t, k] * rows[place of (t, k)]

in float32, starting from 0 with choice 0, and rounds once. Choices without a place add nothing and
are not read. The order of the sum is the same in every backend and layout. The kernel may fuse
product and sum (a fused multiply-add), so it differs from the twin in the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, empty_rows, require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.jit import jit, next_power_of_two, tl
from equipoise_kernels.fp8.moe.row_order import RowOrder
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

_WORD_BYTES = 4

Parts = tuple[Tensor, ...]
"""Rows as 4-byte words [T, W], and their scales [T, G] if they are quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteConfig:
    """Work of a program."""

    columns: int
    """Columns at a time; 4-byte words when copying."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    PermuteConfig(columns=columns, num_warps=num_warps)
    for columns in (256, 512, 1024, 2048)
    for num_warps in (1, 2, 4, 8)
)


def permute(
    x: Tensor | QuantizedRows, order: RowOrder, *, out: Tensor | QuantizedRows | None = None
) -> Tensor | QuantizedRows:
    """Copy rows to their places with the backend selected for this process.

    Args:
        x: rows [T, D] of any dtype, each a multiple of 4 bytes, or quantised rows.
        order: the places.
        out: [M, D] of the same kind; allocated by default, with padding rows uninitialised.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    if out is None:
        out = _empty_like(x, num_rows=len(order.pair_of_row_M))
    if isinstance(x, QuantizedRows) != isinstance(out, QuantizedRows):
        raise KernelInputError("x and out must both be quantised, or neither")
    sources, targets = _parts(x), _parts(out)
    for name, source, target in zip(("x", "scales"), sources, targets, strict=False):
        if source.dim() != 2:
            raise KernelInputError(f"{name} must be [T, columns], not {list(source.shape)}")
        require(name, source, shape=(len(order.place_of_pair_TK), source.shape[1]))
        require(
            "out",
            target,
            source.dtype,
            shape=(len(order.pair_of_row_M), source.shape[1]),
            like=source,
        )
        require("order", order.pair_of_row_M, like=source)
    PERMUTE.on(sources[0].device)(
        (_words("x", sources[0]), *sources[1:]),
        order,
        outs=(_words("out", targets[0]), *targets[1:]),
    )
    return out


def combine(
    rows_MD: Tensor, order: RowOrder, weights_TK: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Sum weighted rows with the backend selected for this process.

    Args:
        rows_MD: rows in slot order, bfloat16, float16 or float32.
        order: the place of each choice's row.
        weights_TK: float32.
        out: [T, D] of the rows' dtype; allocated by default.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("rows", rows_MD, torch.bfloat16, torch.float16, torch.float32)
    if rows_MD.dim() != 2 or rows_MD.shape[0] < len(order.pair_of_row_M):
        raise KernelInputError(
            f"rows must be [{len(order.pair_of_row_M)}, D], not {list(rows_MD.shape)}"
        )
    require("rows", rows_MD, dense=True)
    require(
        "weights", weights_TK, torch.float32, shape=order.place_of_pair_TK.shape, contiguous=True
    )
    shape = (len(weights_TK), rows_MD.shape[1])
    out = rows_MD.new_empty(shape) if out is None else out
    require("out", out, rows_MD.dtype, shape=shape, dense=True)
    for name, tensor in (("weights", weights_TK), ("out", out), ("order", order.place_of_pair_TK)):
        require(name, tensor, like=rows_MD)
    COMBINE.on(rows_MD.device)(rows_MD, order, weights_TK, out=out)
    return out


def permute_reference(parts: Parts, order: RowOrder, *, outs: Parts) -> None:
    """The torch twin."""
    places_N = (order.pair_of_row_M >= 0).nonzero().squeeze(1)
    rows_N = order.pair_of_row_M[places_N].to(torch.int64) // order.place_of_pair_TK.shape[1]
    for part, out in zip(parts, outs, strict=True):
        out[places_N] = part[rows_N]


def combine_reference(rows_MD: Tensor, order: RowOrder, weights_TK: Tensor, *, out: Tensor) -> None:
    """The torch twin."""
    sum_TD = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for places_T, weights_T in zip(
        order.place_of_pair_TK.unbind(1), weights_TK.unbind(1), strict=True
    ):
        has_place_T = places_T >= 0
        chosen = rows_MD[places_T[has_place_T].to(torch.int64)].float()
        sum_TD[has_place_T] += weights_T[has_place_T].unsqueeze(1) * chosen
    out.copy_(sum_TD)


def permute_triton(
    parts: Parts, order: RowOrder, *, outs: Parts, config: PermuteConfig | None = None
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_rows, num_words = parts[0].shape
    if num_rows == 0 or num_words == 0:
        return
    config = config or PERMUTE.config(rows=num_rows)
    words, scales = parts[0], parts[-1]
    out_words, out_scales = outs[0], outs[-1]
    has_scales = len(parts) > 1
    permute_kernel[(num_rows, -(-num_words // config.columns))](
        words,
        scales,
        order.place_of_pair_TK,
        out_words,
        out_scales,
        num_words,
        scales.shape[1],
        words.stride(0),
        *scales.stride(),
        out_words.stride(0),
        *out_scales.stride(),
        TOP_K=order.place_of_pair_TK.shape[1],
        SCALES=next_power_of_two(scales.shape[1]) if has_scales else 0,
        **configurations.options(config),
    )


def combine_triton(
    rows_MD: Tensor,
    order: RowOrder,
    weights_TK: Tensor,
    *,
    out: Tensor,
    config: PermuteConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_rows, dim = out.shape
    if num_rows == 0 or dim == 0:
        return
    config = config or COMBINE.config(rows=num_rows)
    combine_kernel[(num_rows, -(-dim // config.columns))](
        rows_MD,
        order.place_of_pair_TK,
        weights_TK,
        out,
        dim,
        rows_MD.stride(0),
        out.stride(0),
        TOP_K=weights_TK.shape[1],
        **configurations.options(config),
    )


@jit
def permute_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    places_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_scales_ptr: tl.tensor,
    num_words: int,
    num_scales: int,
    row_stride: int,
    scale_row_stride: int,
    scale_column_stride: int,
    out_stride: int,
    out_scale_row_stride: int,
    out_scale_column_stride: int,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program reads some words of one row, and writes them to all its places.

    The first one of a row copies its scales too, if there are any.
    """
    row = tl.program_id(0).to(tl.int64)
    places_ptr += row * TOP_K
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_words
    words = tl.load(words_ptr + row * row_stride + columns, mask=inside)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + choice).to(tl.int64)
        tl.store(out_ptr + place * out_stride + columns, words, mask=inside & (place >= 0))
    if SCALES > 0:
        groups = tl.arange(0, SCALES)
        has_group = (groups < num_scales) & (tl.program_id(1) == 0)
        scale_ptrs = scales_ptr + row * scale_row_stride + groups * scale_column_stride
        scales = tl.load(scale_ptrs, mask=has_group)
        for choice in tl.static_range(TOP_K):
            place = tl.load(places_ptr + choice).to(tl.int64)
            out_ptrs = out_scales_ptr + place * out_scale_row_stride
            out_ptrs += groups * out_scale_column_stride
            tl.store(out_ptrs, scales, mask=has_group & (place >= 0))


@jit
def combine_kernel(
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dim: int,
    rows_stride: int,
    out_stride: int,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program sums some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < dim
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights_ptr + row * TOP_K + choice)
        mask = inside & (place >= 0)
        values = tl.load(rows_ptr + place * rows_stride + columns, mask=mask, other=0.0)
        total += tl.where(place >= 0, weight, 0.0) * values.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def permute_specializations(
    config: PermuteConfig, *, top_k: int, groups: int
) -> list[Specialization]:
    """Specialisations of a configuration: rows with scales, row-major."""
    return [
        Specialization(
            kernel=permute_kernel,
            name=f"permute {config} top_k={top_k}",
            types={
                "words_ptr out_ptr places_ptr": "*i32",
                "scales_ptr out_scales_ptr": "*fp32",
            },
            multiples_of_16="num_words row_stride out_stride",
            options=configurations.options(config)
            # Triton specialises a stride of 1 as a constant.
            | {"scale_column_stride": 1, "out_scale_column_stride": 1}
            | {"TOP_K": top_k, "SCALES": next_power_of_two(groups)},
        )
    ]


def combine_specializations(config: PermuteConfig, *, top_k: int) -> list[Specialization]:
    """Specialisations of a configuration."""
    return [
        Specialization(
            kernel=combine_kernel,
            name=f"combine {config} top_k={top_k}",
            types={"rows_ptr out_ptr": "*bf16", "places_ptr": "*i32", "weights_ptr": "*fp32"},
            multiples_of_16="dim rows_stride out_stride",
            options=configurations.options(config) | {"TOP_K": top_k},
        )
    ]


def _parts(rows: Tensor | QuantizedRows) -> tuple[Tensor, ...]:
    return (rows.codes, rows.scales) if isinstance(rows, QuantizedRows) else (rows,)


def _words(name: str, rows: Tensor) -> Tensor:
    """View the same memory as 4-byte numbers, so that one kernel copies every dtype."""
    require(name, rows, dense=True)
    per_word = max(1, _WORD_BYTES // rows.element_size())
    if rows.shape[1] % per_word != 0 or rows.stride(0) % per_word != 0:
        raise KernelInputError(f"{name}'s rows must be multiples of 4 bytes: pad its columns")
    if rows.storage_offset() % per_word != 0:
        raise KernelInputError(f"{name} must start at a multiple of 4 bytes: call clone()")
    return rows.view(torch.int32)


def _empty_like(x: Tensor | QuantizedRows, *, num_rows: int) -> Tensor | QuantizedRows:
    if isinstance(x, QuantizedRows):
        return empty_rows((num_rows, x.codes.shape[-1]), device=x.codes.device)
    return x.new_empty(num_rows, x.shape[-1])


PERMUTE = KernelOperation(
    name="permute",
    backends={"reference": permute_reference, "triton": permute_triton},
    configs=CONFIG_SPACE,
    specializations=permute_specializations,
)
COMBINE = KernelOperation(
    name="combine",
    backends={"reference": combine_reference, "triton": combine_triton},
    configs=CONFIG_SPACE,
    specializations=combine_specializations,
)

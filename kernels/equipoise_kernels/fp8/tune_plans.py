"""What `tune` times: every operation on DeepSeek-V3's shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from equipoise_kernels.formats import ScaleFormat, empty_rows
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.attention.latent_write import latent_write_triton
from equipoise_kernels.fp8.attention.latents import PlainLatents
from equipoise_kernels.fp8.bench.bench import num_copies
from equipoise_kernels.fp8.bench.mla_inputs import BLOCK_TOKENS, HEADS, ROTARY, mla_inputs
from equipoise_kernels.fp8.bench.moe_inputs import (
    ALIGNMENT,
    route_inputs,
    routed_slots,
    row_order_of,
)
from equipoise_kernels.fp8.bench.prefill_cases import prompts
from equipoise_kernels.fp8.bench.timing import TimedCall
from equipoise_kernels.fp8.gemm.dense import gemm_triton
from equipoise_kernels.fp8.gemm.grouped import grouped_gemm_triton
from equipoise_kernels.fp8.gemm.schedule import MaskedRows
from equipoise_kernels.fp8.moe.permute import combine_triton, permute_triton
from equipoise_kernels.fp8.moe.route import route_triton
from equipoise_kernels.fp8.moe.routes import empty_routes
from equipoise_kernels.fp8.moe.row_order import order_rows, row_order_triton
from equipoise_kernels.fp8.quant.group_quant import group_quant_triton
from equipoise_kernels.fp8.quant.rms_norm_quant import rms_norm_quant_triton
from equipoise_kernels.fp8.quant.silu_mul_quant import silu_mul_quant_triton
from equipoise_kernels.fp8.testing.cases import spread_normal, spread_rows, spread_weight
from equipoise_kernels.fp8.testing.virtual_ranks import VirtualRanks

TuningShape = tuple[int, ...]
# Launches an operation with a configuration, each time on different memory.
Launches = Callable[[Any], list[TimedCall]]
TuningProblem = Callable[[int, TuningShape, torch.Generator], Launches]
Input = TypeVar("Input")

DENSE = (
    (576, 7168), (1536, 7168), (2112, 7168), (4096, 7168), (7168, 2048), (7168, 16384),
    (7168, 18432), (24576, 1536), (36864, 7168),
)  # fmt: skip
"""(N, K) of DeepSeek-V3's dense products, and of the narrow ones that peers time."""

_GROUPS = 8
_CACHED_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlan:
    """What to time an operation on."""

    buckets: tuple[int, ...]
    """Largest rows of each entry; the last bucket also covers everything above."""
    shapes: tuple[TuningShape, ...]
    """(N, K) of weights, or the width of rows."""
    problem: TuningProblem
    """Makes launches of one size."""


def _each(inputs: Sequence[Input], launch: Callable[[Input, Any], object]) -> Launches:
    return lambda config: [partial(launch, one, config) for one in inputs]


def _gemm(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    num_columns, dim = shape
    a = spread_rows((rows, dim), generator)
    weights = [spread_weight(shape, generator) for _ in range(num_copies(num_columns * dim))]
    out = torch.empty(rows, num_columns, dtype=torch.bfloat16, device=generator.device)
    return _each(weights, lambda w, config: gemm_triton(a, w, out=out, config=config))


def _grouped_gemm(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    num_columns, dim = shape
    device = generator.device
    a = spread_rows((_GROUPS, max(rows, 128), dim), generator)
    num_slots = _GROUPS * num_copies(_GROUPS * num_columns * dim)
    weight = spread_weight((num_slots, num_columns, dim), generator)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device).split(_GROUPS)
    counts = torch.full((_GROUPS,), rows, dtype=torch.int32, device=device)
    schedule = MaskedRows(rows_of_group=counts, expected_rows=rows)
    out = torch.empty(*a.codes.shape[:2], num_columns, dtype=torch.bfloat16, device=device)
    return _each(
        slots,
        lambda s, config: grouped_gemm_triton(
            a, weight, s, schedule=schedule, out=out, config=config
        ),
    )


def _all_to_all(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    (dim,) = shape
    sizes = EpShape(
        rank=0,
        num_ranks=_GROUPS,
        slots_per_rank=32,
        top_k=_GROUPS,
        dim=dim,
        max_tokens=rows,
        payload=Payload.BF16,
        # Twice what even routing sends; routes of few rows are never even.
        capacity=2 * rows + 64,
    )
    return lambda config: [
        VirtualRanks(sizes, num_tokens=rows, generator=generator, config=config).exchange
        for _ in range(2)
    ]


def _route(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    del shape
    # Logits come from the product before, and slots from routing: both are in the cache.
    inputs = [route_inputs(rows, generator) for _ in range(_CACHED_COPIES)]
    counters = inputs[0].counters()
    out = empty_routes(rows, inputs[0].rule.top_k, device=generator.device)
    return _each(
        inputs, lambda i, config: i.run(route_triton, rows_S=counters, out=out, config=config)
    )


def _row_order(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    (num_slots,) = shape
    inputs = [routed_slots(rows, generator) % num_slots for _ in range(_CACHED_COPIES)]
    alignment = ALIGNMENT
    out = order_rows(inputs[0], num_slots=num_slots, alignment=alignment)
    return _each(
        inputs, lambda s, config: row_order_triton(s, alignment=alignment, out=out, config=config)
    )


def _permute(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    order = row_order_of(rows, generator)
    inputs = [spread_rows((rows, shape[0]), generator) for _ in range(num_copies(rows * shape[0]))]
    out = empty_rows((len(order.pair_of_row_M), shape[0]), device=generator.device)
    outs = out.codes.view(torch.int32), out.scales
    return _each(
        [(x.codes.view(torch.int32), x.scales) for x in inputs],
        lambda parts, config: permute_triton(parts, order, outs=outs, config=config),
    )


def _combine(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    order = row_order_of(rows, generator)
    buffer = (len(order.pair_of_row_M), shape[0])
    inputs = [spread_normal(buffer, generator) for _ in range(num_copies(2 * buffer[0] * shape[0]))]
    weights = torch.rand(order.place_of_pair_TK.shape, generator=generator, device=generator.device)
    out = inputs[0].new_empty(rows, shape[0])
    return _each(
        inputs, lambda x, config: combine_triton(x, order, weights, out=out, config=config)
    )


def _latent_write(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    (rank,) = shape
    device = generator.device
    width = rank + ROTARY
    raw = torch.randn(rows, width, generator=generator, device=device).bfloat16()
    # Queries come from the product before; the last third of each head's is rotated.
    queries = [
        torch.randn(rows, HEADS, 3 * ROTARY, generator=generator, device=device).bfloat16()
        for _ in range(_CACHED_COPIES)
    ]
    angles = torch.randn(rows, ROTARY // 2, generator=generator, device=device)
    num_blocks = -(-rows // BLOCK_TOKENS)
    cache = PlainLatents(latents_BPC=raw.new_empty(num_blocks, BLOCK_TOKENS, width), rank=rank)
    places = torch.arange(rows, device=device)
    cos, sin = angles.cos(), angles.sin()
    out = raw.new_empty(rows, HEADS, ROTARY)
    return _each(
        queries,
        lambda query, config: latent_write_triton(
            raw,
            query[..., 2 * ROTARY :],
            cache,
            places_T=places,
            weight_R=raw[0, :rank],
            eps=1e-6,
            cos_TF=cos,
            sin_TF=sin,
            out_THP=out,
            config=config,
        ),
    )


def _mla_decode(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    (length,) = shape
    return mla_inputs([length] * rows, generator).calls


def _mla_prefill(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
    (length,) = shape
    return prompts([(rows, max(rows, length))], generator).calls


def _quant(launch: Callable[..., None], in_factor: int = 1, **arguments: Any) -> TuningProblem:
    def problem(rows: int, shape: TuningShape, generator: torch.Generator) -> Launches:
        (dim,) = shape
        copies = num_copies(2 * in_factor * rows * dim)
        inputs = [
            spread_normal((rows, in_factor * dim), generator).clamp(-50, 50) for _ in range(copies)
        ]
        out = empty_rows((rows, dim), device=generator.device)
        run = partial(launch, scale_format=ScaleFormat.FP32, out=out, **arguments)
        return _each(inputs, lambda x, config: run(x, config=config))

    return problem


def _rms_norm_quant(x: torch.Tensor, **arguments: Any) -> None:
    rms_norm_quant_triton(x, x[0], eps=1e-6, residual_MD=None, **arguments)


PLANS: Mapping[str, TuningPlan] = {
    "all_to_all": TuningPlan(buckets=(256, 1024), shapes=((7168,),), problem=_all_to_all),
    "gemm": TuningPlan(buckets=(16, 32, 64, 128, 256, 1024, 4096), shapes=DENSE, problem=_gemm),
    "grouped_gemm": TuningPlan(
        buckets=(16, 32, 64, 128, 1024, 4096),
        shapes=((4096, 7168), (7168, 2048)),
        problem=_grouped_gemm,
    ),
    "route": TuningPlan(buckets=(256, 8192), shapes=((256,),), problem=_route),
    "row_order": TuningPlan(buckets=(2048, 32768), shapes=((32,), (288,)), problem=_row_order),
    "permute": TuningPlan(buckets=(256, 4096), shapes=((7168,),), problem=_permute),
    "combine": TuningPlan(buckets=(256, 4096), shapes=((7168,),), problem=_combine),
    "latent_write": TuningPlan(buckets=(256, 4096), shapes=((512,),), problem=_latent_write),
    "mla_decode": TuningPlan(buckets=(8, 128), shapes=((4096,),), problem=_mla_decode),
    "mla_prefill": TuningPlan(buckets=(512, 4096), shapes=((4096,),), problem=_mla_prefill),
    "group_quant": TuningPlan(
        buckets=(256, 4096), shapes=((7168,),), problem=_quant(group_quant_triton)
    ),
    "rms_norm_quant": TuningPlan(
        buckets=(256, 4096), shapes=((7168,),), problem=_quant(_rms_norm_quant)
    ),
    "silu_mul_quant": TuningPlan(
        buckets=(256, 4096),
        shapes=((2048,),),
        problem=_quant(silu_mul_quant_triton, 2, rows_per_group=None),
    ),
}

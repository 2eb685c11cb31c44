"""Shapes and edge cases of the tests of DeepGEMM, FlashMLA, DeepEP, TileKernels and SGLang, as far
as contracts cover them: kernels in the interpreter against their twins.

The first of each list runs always, the others with `-m peers` (a few minutes).
"""

from dataclasses import replace

import pytest
import torch

from equipoise_kernels.formats import (
    QuantizedWeight,
    ScaleFormat,
    ScaleLayout,
    empty_rows,
    weight_scale_shape,
)
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.attention.latents import PlainLatents, QuantizedLatents
from equipoise_kernels.fp8.attention.mla_decode import (
    MlaDecodeConfig,
    mla_decode_reference,
    mla_decode_triton,
)
from equipoise_kernels.fp8.attention.mla_merge import AttentionOutput
from equipoise_kernels.fp8.attention.mla_prefill import (
    MlaPrefillConfig,
    PrefillInputs,
    mla_prefill_reference,
    mla_prefill_triton,
)
from equipoise_kernels.fp8.gemm.dense import GemmConfig, gemm_reference, gemm_triton
from equipoise_kernels.fp8.gemm.grouped import (
    GroupedGemmConfig,
    grouped_gemm_reference,
    grouped_gemm_triton,
)
from equipoise_kernels.fp8.gemm.schedule import ContiguousRows, MaskedRows, PrefixSumRows
from equipoise_kernels.fp8.moe.permute import combine_reference, combine_triton, permute_reference
from equipoise_kernels.fp8.moe.route import route_reference, route_triton
from equipoise_kernels.fp8.moe.routes import RoutingRule, SlotTables, empty_routes
from equipoise_kernels.fp8.moe.row_order import order_rows
from equipoise_kernels.fp8.quant.group_quant import group_quant_reference, group_quant_triton
from equipoise_kernels.fp8.quant.silu_mul_quant import (
    silu_mul_quant_reference,
    silu_mul_quant_triton,
)
from equipoise_kernels.fp8.quant.weight_quant import QUANTIZE_WEIGHT
from equipoise_kernels.fp8.testing.cases import spread_rows, spread_weight
from equipoise_kernels.fp8.testing.virtual_ranks import VirtualRanks
from equipoise_kernels.numerics import difference

SWAPPED = GemmConfig(
    block_m=32, block_n=128, swap_ab=True, split_k=1, group_m=1, num_warps=4, num_stages=3,
    ctas_per_sm=1,
)  # fmt: skip
GROUPED = GroupedGemmConfig(
    block_m=32, block_n=128, swap_ab=True, num_warps=4, num_stages=3, ctas_per_sm=1
)


def first_always(cases):
    """The first case without a mark, the others with the mark `peers`."""
    return [
        cases[0],
        *(
            pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.peers)
            for one in cases[1:]
        ),
    ]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


# sglang test_block_fp8, DeepGEMM test_fp8: odd rows, columns that end within a block, long K.
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "dim", "split_k"),
    first_always([
        (7, 576, 512, 1), (1, 7748, 256, 1), (83, 2112, 256, 2), (33, 128, 7168, 4),
        (512, 136, 256, 1), (1, 24576, 128, 1), (128, 1, 384, 3),
    ]),
)  # fmt: skip
def test_dense_products(num_rows, num_columns, dim, split_k, generator, interpreted):
    for layout in ScaleLayout:
        a = spread_rows((num_rows, dim), generator, layout=layout)
        weight = spread_weight((num_columns, dim), generator)
        out, wanted = (torch.full((num_rows, num_columns), float("nan")) for _ in range(2))
        gemm_triton(a, weight, out=out, config=replace(SWAPPED, split_k=split_k))
        gemm_reference(a, weight, out=wanted)
        assert difference(out, wanted) < 1e-10


# DeepGEMM's masked tests: max_m below a tile (its issue 268), empty experts, wrong hints, counts
# beyond the room, many groups; TileKernels: all empty.
@pytest.mark.parametrize(
    ("counts", "capacity", "hint"),
    first_always([
        ([3, 0, 31, 999], 32, 1), ([0, 0, 0], 16, 16), ([1] * 33, 8, 4096), ([200, 0, 5], 256, 8),
        ([64, 64, 63], 64, 64),
    ]),
)  # fmt: skip
def test_masked_products(counts, capacity, hint, generator, interpreted):
    a = spread_rows((len(counts), capacity, 256), generator)
    weight = spread_weight((len(counts) + 1, 192, 256), generator)
    slots = int32([(3 * group + 1) % (len(counts) + 1) for group in range(len(counts))])
    schedule = MaskedRows(rows_of_group=int32(counts), expected_rows=hint)
    out, wanted = (torch.full((len(counts), capacity, 192), float("nan")) for _ in range(2))
    grouped_gemm_triton(a, weight, slots, schedule=schedule, out=out, config=GROUPED)
    grouped_gemm_reference(a, weight, slots, schedule=schedule, out=wanted)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert difference(out.nan_to_num(), wanted.nan_to_num()) < 1e-10


# DeepEP's expanded layout into DeepGEMM's psum: empty first and last groups, exact blocks.
@pytest.mark.parametrize(
    "counts",
    first_always([[0, 128, 5, 0], [0, 0, 0], [1, 1, 1], [129, 0, 128], [0, 300]]),
)
def test_prefix_sum_products(counts, generator, interpreted):
    ends, start = [], 0
    for count in counts:
        ends.append(start + count)
        start = -(-ends[-1] // 128) * 128
    a = spread_rows((max(start, 128), 128), generator)
    weight = spread_weight((len(counts), 128, 128), generator)
    slots = int32(list(reversed(range(len(counts)))))
    schedule = PrefixSumRows(group_ends=int32(ends))
    out, wanted = (torch.full((len(a.codes), 128), float("nan")) for _ in range(2))
    grouped_gemm_triton(a, weight, slots, schedule=schedule, out=out, config=GROUPED)
    grouped_gemm_reference(a, weight, slots, schedule=schedule, out=wanted)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert difference(out.nan_to_num(), wanted.nan_to_num()) < 1e-10


# DeepGEMM's contiguous tests: blocks of 128 rows, of which padding is marked -1; empty groups.
@pytest.mark.parametrize(
    "counts", first_always([[0, 128, 5], [0, 0, 1], [129, 0, 128], [1, 1, 1], [300]])
)
def test_contiguous_products(counts, generator, interpreted):
    groups = torch.full((sum(-(-count // 128) for count in counts), 128), -1, dtype=torch.int32)
    first = 0
    for group, count in enumerate(counts):
        groups.view(-1)[128 * first : 128 * first + count] = group
        first += -(-count // 128)
    a = spread_rows((groups.numel(), 128), generator)
    weight = spread_weight((len(counts) + 1, 192, 128), generator)
    slots = int32([(2 * group + 1) % (len(counts) + 1) for group in range(len(counts))])
    schedule = ContiguousRows(group_of_row=groups.flatten())
    out, wanted = (torch.full((len(a.codes), 192), float("nan")) for _ in range(2))
    grouped_gemm_triton(a, weight, slots, schedule=schedule, out=out, config=GROUPED)
    grouped_gemm_reference(a, weight, slots, schedule=schedule, out=wanted)
    assert torch.equal(wanted.isnan().all(1), groups.flatten() < 0)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert difference(out.nan_to_num(), wanted.nan_to_num()) < 1e-10


# FlashMLA's tests: odd heads, short, empty and long sequences, NaN behind their ends, shared
# blocks, arbitrary numbers in tables beyond an end, all sizes of blocks.
@pytest.mark.parametrize(
    ("heads", "lengths", "block", "per_split", "is_fp8"),
    first_always([
        (9, [20, 0, 65], 64, 64, False), (1, [1, 140, 0], 64, 64, False),
        (63, [65], 64, 128, False), (126, [20, 140], 64, 64, False),
        (128, [140], 128, 512, False), (3, [20, 7, 1], 1, 64, False),
        (3, [64, 128], 64, 64, False), (9, [20, 0, 65], 64, 64, True), (64, [140, 1], 64, 64, True),
    ]),
)  # fmt: skip
def test_attention(heads, lengths, block, per_split, is_fp8, generator, interpreted):
    width = -(-max(lengths) // block)
    values = torch.randn(2 * width + 1, block, 144, generator=generator).bfloat16()
    tables = torch.full((len(lengths), width), 2147480000, dtype=torch.int32)
    for query, length in enumerate(lengths):
        used = -(-length // block)
        # All sequences share their first block.
        tables[query, :used] = torch.arange(used, dtype=torch.int32) + (query % 2) * width
        tables[query, :1] = 0 if used else 2147480000
    if len(lengths) == 1 and lengths[0] % block:
        values[width - 1, lengths[0] % block :] = float("nan")
    cache = quantized(values) if is_fp8 else PlainLatents(latents_BPC=values, rank=128)
    query = torch.randn(len(lengths), heads, 144, generator=generator).bfloat16()
    config = MlaDecodeConfig(
        heads=64 if heads > 16 else 16, tokens=32, tokens_per_split=64, num_warps=4, num_stages=3
    )
    seen = []
    for run, options in ((mla_decode_triton, {"config": config}), (mla_decode_reference, {})):
        out = AttentionOutput(
            out_BHR=query.new_empty(len(lengths), heads, 128),
            lse_BH=query.new_empty(len(lengths), heads, dtype=torch.float32),
        )
        run(
            query, cache, tables_BS=tables, lengths_B=int32(lengths), scale=0.1,
            tokens_per_split=per_split, out=out, **options,
        )  # fmt: skip
        seen.append(out)
    ours, theirs = seen
    assert difference(ours.out_BHR, theirs.out_BHR) < 1e-5
    torch.testing.assert_close(ours.lse_BH, theirs.lse_BH, rtol=1e-5, atol=1e-5)


def quantized(values):
    """The latents in FP8, 128 numbers of them."""
    num_blocks, block, _ = values.shape
    rows = empty_rows((num_blocks * block, 128), device="cpu")
    compressed = values[..., :128].reshape(-1, 128)
    group_quant_reference(compressed, scale_format=ScaleFormat.FP32, out=rows)
    return QuantizedLatents(
        codes_BPR=rows.codes.view(num_blocks, block, 128),
        scales_BPG=rows.scales.view(num_blocks, block, 1),
        rotary_BPP=values[..., 128:].contiguous(),
    )


# FlashMLA's and sglang's dense prefill: several prompts, with prefixes, of one query, and with as
# many positions as a tile or one more.
@pytest.mark.parametrize(
    ("heads", "prompts"),
    first_always([
        (3, [(1, 1), (33, 33)]), (1, [(128, 128)]), (2, [(129, 129), (1, 200)]),
        (5, [(17, 64), (64, 65), (2, 2)]), (128, [(3, 19)]), (1, [(20, 300)]),
    ]),
)  # fmt: skip
def test_prompts(heads, prompts, generator, interpreted):
    num_queries, num_keys = map(sum, zip(*prompts, strict=True))
    segments, query, key = [], 0, 0
    for count, length in prompts:
        segments.append([query, count, length - count, key, length, 0])
        query, key = query + count, key + length
    queries = torch.randn(num_queries, heads, 48, generator=generator).bfloat16()
    given = PrefillInputs(
        plain_THn=queries[..., :32],
        rotary_THP=queries[..., 32:],
        keys_values_NHw=torch.randn(num_keys, heads, 64, generator=generator).bfloat16(),
        key_rotary_NP=torch.randn(num_keys, 16, generator=generator).bfloat16(),
        segments_S6=int32(segments),
        most_queries=max(count for count, _ in prompts),
    )
    config = MlaPrefillConfig(queries=64, keys=32, num_warps=4, num_stages=3)
    seen = []
    for run, options in ((mla_prefill_triton, {"config": config}), (mla_prefill_reference, {})):
        out = torch.full((num_queries, heads, 32), float("nan"))
        lse = torch.full((num_queries, heads), float("nan"))
        run(given, scale=0.2, out_THv=out, lse_TH=lse, **options)
        seen.append((out, lse))
    assert difference(seen[0][0], seen[1][0]) < 1e-5
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=1e-5, atol=1e-5)


def rule(num_experts, num_groups, top_groups, top_k):
    return RoutingRule(
        num_experts=num_experts, num_groups=num_groups, top_groups=top_groups, top_k=top_k,
        normalize=True, scale=2.5,
    )  # fmt: skip


# TileKernels' and sglang's gates: DeepSeek's, Kimi's 384 experts, sizes that are no power of two.
@pytest.mark.parametrize(
    ("sizes", "kind"),
    first_always([
        ((72, 1, 1, 6), "ties"), ((256, 8, 4, 8), "random"), ((128, 4, 2, 4), "extreme"),
        ((384, 1, 1, 8), "random"), ((512, 16, 8, 16), "random"), ((108, 1, 1, 3), "extreme"),
        ((144, 8, 4, 6), "ties"),
    ]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gates(sizes, kind, generator, interpreted):
    gate = rule(*sizes)
    logits = torch.randn(3, gate.num_experts, generator=generator)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "extreme":
        logits[0, ::3], logits[1, ::5] = float("inf"), float("-inf")
    tables = SlotTables(
        slots_of_expert_ER=torch.arange(2 * gate.num_experts).view(-1, 2),
        replica_count_E=torch.full((gate.num_experts,), 2),
    )
    seen = []
    for run in (route_triton, route_reference):
        out = empty_routes(3, gate.top_k, device="cpu")
        rows = torch.zeros(2 * gate.num_experts, dtype=torch.int64)
        run(
            logits, torch.zeros(gate.num_experts), rule=gate, tables=tables,
            token_ids_T=torch.arange(3), layer=1, rows_S=rows,
            num_valid=int32([2]), out=out,
        )  # fmt: skip
        seen.append((out.expert_ids_TK, out.slots_TK, rows, out.weights_TK))
    for ours, theirs in zip(seen[0][:3], seen[1][:3], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(seen[0][3], seen[1][3], rtol=1e-6, atol=0)


# TileKernels' casts: every code, zeros, one row, and many; both formats of scales.
@pytest.mark.parametrize(
    ("num_rows", "dim", "scale_format"),
    first_always([
        (7, 512, ScaleFormat.UE8M0), (1, 7168, ScaleFormat.FP32), (83, 256, ScaleFormat.FP32),
        (512, 128, ScaleFormat.UE8M0),
    ]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_casts(num_rows, dim, scale_format, generator, interpreted):
    x = torch.randn(num_rows, 2 * dim, generator=generator) * 10
    x[0] = 0.0
    x[-1, :256] = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
    x = x.bfloat16()
    for run, twin, rows, options in (
        (group_quant_triton, group_quant_reference, x[:, :dim], {}),
        (silu_mul_quant_triton, silu_mul_quant_reference, x, {"rows_per_group": None}),
    ):
        seen = [empty_rows((num_rows, dim), device="cpu") for _ in range(2)]
        run(rows, scale_format=scale_format, out=seen[0], **options)
        twin(rows, scale_format=scale_format, out=seen[1], **options)
        assert difference(seen[0].dequantized(), seen[1].dequantized()) < 1e-5


# DeepGEMM's per_block_cast_to_fp8 and TileKernels' block casts: blocks that are not whole.
@pytest.mark.parametrize(
    ("shape", "scale_format"),
    first_always([
        ((129, 256), ScaleFormat.FP32), ((1, 128), ScaleFormat.UE8M0),
        ((576, 384), ScaleFormat.FP32),
    ]),
)  # fmt: skip
def test_weight_casts(shape, scale_format, generator, interpreted):
    weight = torch.randn(shape, generator=generator).bfloat16()
    weight[:, :128] = 0.0
    seen = [
        QuantizedWeight(
            codes=torch.empty(shape, dtype=torch.float8_e4m3fn),
            scales=torch.empty(weight_scale_shape(shape)),
        )
        for _ in range(2)
    ]
    for name, out in zip(("triton", "reference"), seen, strict=True):
        QUANTIZE_WEIGHT.backends[name](weight, scale_format=scale_format, out=out)
    assert torch.equal(seen[0].scales, seen[1].scales)
    assert torch.equal(seen[0].codes.view(torch.uint8), seen[1].codes.view(torch.uint8))


# TileKernels' mapping, expansion and reduction: rows without a choice, one slot for all, no rows.
@pytest.mark.parametrize(
    ("num_rows", "num_slots", "top_k"),
    first_always([(9, 4, 3), (1, 1, 1), (33, 72, 8), (5, 2, 2)]),
)
def test_moves(num_rows, num_slots, top_k, generator, interpreted):
    slots = torch.randint(-1, num_slots, (num_rows, top_k), generator=generator)
    slots[0] = -1
    order = order_rows(slots, num_slots=num_slots, alignment=4)
    x = torch.randn(num_rows, 96, generator=generator)
    moved = torch.zeros(len(order.pair_of_row_M), 96)
    permute_reference((x,), order, outs=(moved,))
    weights = torch.rand(num_rows, top_k, generator=generator)
    seen = [torch.empty(num_rows, 96) for _ in range(2)]
    combine_triton(moved, order, weights, out=seen[0])
    combine_reference(moved, order, weights, out=seen[1])
    expected = x * (weights * (slots >= 0)).sum(dim=1, keepdim=True)
    for out in seen:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


# DeepEP's low-latency and expanded tests: more choices than slots of a rank, no tokens.
@pytest.mark.parametrize(
    ("num_ranks", "slots_per_rank", "top_k", "num_tokens", "is_padded"),
    first_always(
        [(2, 2, 3, 3, False), (3, 1, 2, 2, True), (2, 3, 4, 0, False), (4, 2, 8, 1, True)]
    ),
)
def test_exchanges(num_ranks, slots_per_rank, top_k, num_tokens, is_padded, generator, interpreted):
    shape = EpShape(
        rank=0, num_ranks=num_ranks, slots_per_rank=slots_per_rank, top_k=top_k, dim=128,
        max_tokens=4, payload=Payload.BF16,
    )  # fmt: skip
    layout = RowLayout(rows_per_slot=4 * num_ranks) if is_padded else None
    ranks = VirtualRanks(shape, num_tokens=num_tokens, generator=generator, layout=layout)
    for _ in range(2):
        ranks.exchange()
        assert all(map(torch.equal, ranks.sums, ranks.expected()))

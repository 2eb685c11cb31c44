from unittest import mock

import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import ScaleFormat, empty_rows
from equipoise_kernels.fp8.attention import mla_decode as mla_decode_module
from equipoise_kernels.fp8.attention.latents import PlainLatents, QuantizedLatents
from equipoise_kernels.fp8.attention.mla_decode import (
    MlaDecodeConfig,
    mla_decode,
    mla_decode_reference,
    mla_decode_triton,
    most_partial_results,
)
from equipoise_kernels.fp8.attention.mla_merge import AttentionOutput, merge_splits
from equipoise_kernels.fp8.quant.group_quant import group_quant_reference
from equipoise_kernels.numerics import difference
from tests.support.guarded_tensors import guarded
from tests.support.live_bytes import LiveBytes

RANK, ROTARY, BLOCK, NUM_BLOCKS = 128, 16, 16, 12
SCALE = 0.11
# Steps of one block, and steps of two with heads enough for a warp group.
CONFIG, WIDE = (
    MlaDecodeConfig(
        heads=heads, tokens=tokens, tokens_per_split=64, num_warps=num_warps, num_stages=1
    )
    for heads, tokens, num_warps in ((16, 16, 4), (64, 32, 8))
)


def latents(kind, generator):
    values = torch.randn(NUM_BLOCKS, BLOCK, RANK + ROTARY, generator=generator)
    # What an earlier sequence left, which no query may see.
    values[NUM_BLOCKS - 1] = float("nan")
    if kind is not torch.float8_e4m3fn:
        return PlainLatents(latents_BPC=values.to(kind), rank=RANK)
    rows = empty_rows((NUM_BLOCKS * BLOCK, RANK), device="cpu")
    x = values[..., :RANK].reshape(-1, RANK)
    group_quant_reference(x, scale_format=ScaleFormat.FP32, out=rows)
    return QuantizedLatents(
        codes_BPR=rows.codes.view(NUM_BLOCKS, BLOCK, RANK),
        scales_BPG=rows.scales.view(NUM_BLOCKS, BLOCK, 1),
        rotary_BPP=values[..., RANK:].bfloat16(),
    )


def exact(query, cache, tables, lengths):
    """The contract in float64, position by position as the tables say."""
    values = cache.values().double()
    outs, sums = [], []
    for q, table, length in zip(query.double(), tables.tolist(), lengths.tolist(), strict=True):
        seen = torch.stack([values[table[p // BLOCK], p % BLOCK] for p in range(length)])
        scores = q @ seen.T * SCALE
        outs.append(scores.softmax(-1) @ seen[:, :RANK])
        sums.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)


def attended(run, query, cache, tables, lengths, **options):
    num_queries, num_heads, _ = query.shape
    guards = guarded((num_queries * num_heads, RANK), query.dtype, column_guard=0)
    sums = guarded((num_queries * num_heads, 1), torch.float32, column_guard=0)
    out = AttentionOutput(
        out_BHR=guards.view.view(num_queries, num_heads, RANK),
        lse_BH=sums.view.view(num_queries, num_heads),
    )
    options = {"tokens_per_split": None} | options
    run(query, cache, tables_BS=tables, lengths_B=lengths, scale=SCALE, out=out, **options)
    assert guards.guard_is_intact()
    assert sums.guard_is_intact()
    return out


def queries(num_queries, num_heads, generator, dtype=torch.bfloat16):
    return torch.randn(num_queries, num_heads, RANK + ROTARY, generator=generator).to(dtype)


# The first sequence ends within a block, and what its table says beyond is not to be read.
TABLES = torch.tensor([[7, 2, NUM_BLOCKS - 1, 900], [0, 3, 9, 4]], dtype=torch.int32)
LENGTHS = torch.tensor([19, 64], dtype=torch.int32)


@pytest.mark.parametrize(
    ("config", "tokens_per_split"),
    [(CONFIG, 64), (CONFIG, 32), (CONFIG, 16), (WIDE, 64), (WIDE, 32)],
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_kernel_and_reference_match_float64(kind, config, tokens_per_split, generator, interpreted):
    cache, query = latents(kind, generator), queries(2, 3, generator)
    wanted, sums = exact(query, cache, TABLES, LENGTHS)
    twin = attended(mla_decode_reference, query, cache, TABLES, LENGTHS)
    kernel = attended(
        mla_decode_triton, query, cache, TABLES, LENGTHS,
        tokens_per_split=tokens_per_split, config=config,
    )  # fmt: skip
    for out in (twin, kernel):
        for got, right in zip(out.out_BHR, wanted, strict=True):
            assert difference(got, right) < 1e-5
        torch.testing.assert_close(out.lse_BH.double(), sums, rtol=1e-5, atol=1e-5)


def test_float32_stays_exact_and_heads_may_be_more_than_a_program_has(generator, interpreted):
    cache, query = latents(torch.float32, generator), queries(2, 17, generator, torch.float32)
    wanted, _ = exact(query, cache, TABLES, LENGTHS)
    kernel = attended(mla_decode_triton, query, cache, TABLES, LENGTHS, config=CONFIG)
    torch.testing.assert_close(kernel.out_BHR.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_query_gets_the_same_bits_whatever_it_is_batched_with(generator, interpreted):
    cache, query = latents(torch.bfloat16, generator), queries(2, 2, generator)
    options = {"tokens_per_split": 16, "config": CONFIG}
    both = attended(mla_decode_triton, query, cache, TABLES, LENGTHS, **options)
    alone = attended(
        mla_decode_triton, query[1:], cache, TABLES[1:].contiguous(), LENGTHS[1:], **options
    )
    assert torch.equal(both.out_BHR[1:], alone.out_BHR)
    # An unused end of the table changes nothing either.
    wider = torch.cat([TABLES, TABLES], dim=1)
    again = attended(mla_decode_triton, query, cache, wider, LENGTHS, **options)
    assert torch.equal(both.out_BHR, again.out_BHR)


def test_a_split_without_positions_writes_no_output(generator, interpreted, monkeypatch):
    seen = []

    def captured(partial, *, out):
        seen.append(partial)
        merge_splits(partial, out=out)

    monkeypatch.setattr(mla_decode_module, "merge_splits", captured)
    # Fills new memory with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        cache, query = latents(torch.bfloat16, generator), queries(2, 3, generator)
        options = {"tokens_per_split": 32, "config": CONFIG}
        out = attended(mla_decode_triton, query, cache, TABLES, LENGTHS, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    (partial,) = seen
    is_empty = torch.tensor([False, True, False, False])
    assert partial.out_BHR[is_empty].isnan().all()
    assert (partial.lse_BH[is_empty] == float("-inf")).all()
    assert not partial.out_BHR[~is_empty].isnan().any()
    assert not out.out_BHR.isnan().any()


@pytest.mark.parametrize("tokens_per_split", [64, 32])
def test_a_query_that_sees_nothing_gets_zeros(tokens_per_split, generator, interpreted):
    cache, query = latents(torch.bfloat16, generator), queries(2, 1, generator)
    lengths = torch.tensor([0, -3], dtype=torch.int32)
    for run, options in (
        (mla_decode_reference, {}),
        (mla_decode_triton, {"config": CONFIG, "tokens_per_split": tokens_per_split}),
    ):
        out = attended(run, query, cache, TABLES, lengths, **options)
        assert (out.out_BHR == 0).all()
        assert (out.lse_BH == float("-inf")).all()
    none = mla_decode(query[:0], cache, tables_BS=TABLES[:0], lengths_B=LENGTHS[:0], scale=SCALE)
    assert none.out_BHR.shape == (0, 1, RANK)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize(("config", "tokens_per_split"), [(CONFIG, 64), (CONFIG, 32), (WIDE, 64)])
def test_tables_and_lengths_that_lie_make_nan_of_their_own_query_only(
    config, tokens_per_split, generator, interpreted
):
    cache, query = latents(torch.bfloat16, generator), queries(4, 1, generator)
    tables = torch.tensor(
        [[1, NUM_BLOCKS, 2, 3], [1, -1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]], dtype=torch.int32
    )
    lengths = torch.tensor([20, 33, 65, 64], dtype=torch.int32)
    for run, options in (
        (mla_decode_reference, {}),
        (mla_decode_triton, {"config": config, "tokens_per_split": tokens_per_split}),
    ):
        out = attended(run, query, cache, tables, lengths, **options)
        assert out.out_BHR[:3].isnan().all()
        assert out.lse_BH[:3].isnan().all()
        assert not out.out_BHR[3].isnan().any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query_BHC": torch.zeros(2, 3, 144, dtype=torch.float16)}, "query must be bfloat16"),
        ({"query_BHC": torch.zeros(2, 3, 128)}, r"query must be \[2, 3, 144\]"),
        ({"query_BHC": torch.zeros(2, 144)}, r"query must be \[B, H, C\]"),
        ({"tables_BS": TABLES.long()}, "tables must be int32"),
        ({"tables_BS": TABLES[:1]}, r"tables must be \[2, 4\]"),
        ({"tables_BS": torch.zeros(4, 2, dtype=torch.int32).t()}, "tables must be contiguous"),
        ({"lengths_B": LENGTHS[:1]}, "lengths must be"),
        ({"tokens_per_split": 100}, "multiple of 64"),
        (
            {"out": AttentionOutput(out_BHR=torch.zeros(2, 3, 64), lse_BH=torch.zeros(2, 3))},
            "out must",
        ),
    ],
)
def test_inputs_that_break_the_contract_are_rejected_by_name(change, named, generator):
    good = {"query_BHC": torch.zeros(2, 3, 144), "tables_BS": TABLES, "lengths_B": LENGTHS}
    with pytest.raises(KernelInputError, match=named):
        mla_decode(**good | change, latents=latents(torch.bfloat16, generator), scale=1.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PlainLatents(latents_BPC=torch.zeros(4, 12, 144), rank=128), "power of two"),
        (lambda: PlainLatents(latents_BPC=torch.zeros(4, 16, 136), rank=128), "rotated numbers"),
        (lambda: PlainLatents(latents_BPC=torch.zeros(4, 16, 144), rank=100), "compressed numbers"),
        (lambda: PlainLatents(latents_BPC=torch.zeros(16, 144), rank=128), "positions"),
        (lambda: QuantizedLatents(
            codes_BPR=torch.zeros(4, 16, 128, dtype=torch.float8_e4m3fn),
            scales_BPG=torch.zeros(4, 16, 2),
            rotary_BPP=torch.zeros(4, 16, 16, dtype=torch.bfloat16)), "scales must be"),
    ],
)  # fmt: skip
def test_latents_that_break_the_contract_are_rejected_by_name(make, named):
    with pytest.raises(KernelInputError, match=named):
        make()


def partial_results(num_queries, *, num_heads, num_positions, monkeypatch):
    """How many results of splits a launch allocates, in DeepSeek-V3's sizes."""
    rank, rotary, block = 512, 64, 64
    num_blocks = -(-num_positions // block)
    with torch.device("meta"):
        query = torch.empty(num_queries, num_heads, rank + rotary, dtype=torch.bfloat16)
        tables = torch.empty(num_queries, num_blocks, dtype=torch.int32)
        cache = torch.empty(num_blocks, block, rank + rotary, dtype=torch.bfloat16)
        out = AttentionOutput(
            out_BHR=torch.empty(num_queries, num_heads, rank, dtype=torch.bfloat16),
            lse_BH=torch.empty(num_queries, num_heads),
        )
    launched = []
    kernel = mock.MagicMock()
    kernel.__getitem__.return_value = lambda *_args, **_options: launched.append("decode")
    monkeypatch.setattr(mla_decode_module, "mla_decode_kernel", kernel)
    monkeypatch.setattr(
        mla_decode_module, "merge_splits", lambda *_args, **_options: launched.append("merge")
    )
    with LiveBytes() as live:
        mla_decode_triton(
            query,
            PlainLatents(latents_BPC=cache, rank=rank),
            tables_BS=tables,
            lengths_B=tables[:, 0],
            scale=SCALE,
            tokens_per_split=None,
            out=out,
        )
    assert launched == ["decode", "merge"][: 1 + (live.peak > 0)]
    number, rest = divmod(live.peak, num_heads * (rank + 1) * 4)
    assert rest == 0
    return number


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_positions", [512, 4096, 32_768, 163_840])
def test_the_partial_results_that_are_charged_are_the_most_of_any_launch(
    num_heads, num_positions, monkeypatch
):
    sizes = {"num_heads": num_heads, "num_positions": num_positions}
    of_launches = {
        queries: partial_results(queries, **sizes, monkeypatch=monkeypatch)
        for queries in (1, 15, 16, 17, 32, 33, 64, 65, 200, 512)
    }
    for queries in of_launches:
        most = max(of_launches[fewer] for fewer in of_launches if fewer <= queries)
        # FlashMLA has one for each query and program, whatever the positions.
        assert most_partial_results(queries, **sizes) == max(most, queries + 132)

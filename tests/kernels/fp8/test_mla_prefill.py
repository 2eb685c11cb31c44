from dataclasses import replace

import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.attention.mla_prefill import (
    MlaPrefillConfig,
    PrefillInputs,
    mla_prefill,
    mla_prefill_reference,
    mla_prefill_triton,
)
from equipoise_kernels.numerics import difference

HEADS, PLAIN, ROTARY, VALUE = 3, 32, 16, 64
SCALE = 0.17
CONFIG = MlaPrefillConfig(queries=16, keys=16, num_warps=4, num_stages=1)

# First query, queries, position, first key, keys, position of the first key: a prompt from its
# start, one query, and the rest of a prompt, the last tile of which is not full.
PROMPTS = [[1, 18, 0, 2, 18, 0], [19, 1, 6, 20, 7, 0], [21, 20, 17, 30, 37, 0]]
NUM_QUERIES, NUM_KEYS = 43, 70


def inputs(segments, generator, dtype=torch.bfloat16, heads=HEADS):
    """Queries and keys as products make them: views of wider rows."""
    whole = torch.randn(NUM_QUERIES, heads, PLAIN + ROTARY, generator=generator).to(dtype)
    latents = torch.randn(NUM_KEYS, 48 + ROTARY, generator=generator).to(dtype)
    keys_values = torch.randn(NUM_KEYS, heads * (PLAIN + VALUE), generator=generator).to(dtype)
    return PrefillInputs(
        plain_THn=whole[..., :PLAIN],
        rotary_THP=whole[..., PLAIN:].contiguous(),
        keys_values_NHw=keys_values.view(NUM_KEYS, heads, -1),
        key_rotary_NP=latents[:, 48:],
        segments_S6=torch.tensor(segments, dtype=torch.int32),
        most_queries=max(segment[1] for segment in segments),
    )


def poisoned(given):
    num_queries, heads, _ = given.plain_THn.shape
    out = torch.full((num_queries, heads, VALUE), float("nan"))
    return {"out_THv": out, "lse_TH": out[..., 0].clone()}


def attended(run, given, **options):
    out = poisoned(given)
    run(given, scale=SCALE, **out, **options)
    return out["out_THv"], out["lse_TH"]


def exact(given, segments):
    """The contract in float64, query by query; NaN where no segment has a query."""
    out = poisoned(given)
    plain, rotary = given.plain_THn.double(), given.rotary_THP.double()
    for first, count, position, first_key, _, _ in segments:
        for query in range(count):
            seen = slice(first_key, first_key + position + query + 1)
            keys, values = given.keys_values_NHw[seen].double().split([PLAIN, VALUE], dim=2)
            scores = torch.einsum("hn,khn->hk", plain[first + query], keys)
            scores += torch.einsum(
                "hp,kp->hk", rotary[first + query], given.key_rotary_NP[seen].double()
            )
            scores *= SCALE
            out["out_THv"][first + query] = torch.einsum("hk,khv->hv", scores.softmax(1), values)
            out["lse_TH"][first + query] = scores.logsumexp(1)
    return out["out_THv"], out["lse_TH"]


def assert_close(seen, wanted, bound):
    for ours, right in zip(seen, wanted, strict=True):
        assert torch.equal(ours.isnan(), right.isnan())
        assert difference(ours.nan_to_num(), right.nan_to_num()) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-5), (torch.float32, 1e-12)])
def test_kernel_and_reference_match_float64_and_write_only_their_rows(
    dtype, bound, generator, interpreted
):
    given = inputs(PROMPTS, generator, dtype)
    wanted = exact(given, PROMPTS)
    assert wanted[0].isnan().sum() == 4 * HEADS * VALUE
    assert_close(attended(mla_prefill_reference, given), wanted, 1e-12)
    assert_close(attended(mla_prefill_triton, given, config=CONFIG), wanted, bound)
    wider = replace(CONFIG, queries=64, keys=32)
    assert_close(attended(mla_prefill_triton, given, config=wider), wanted, bound)


@pytest.mark.parametrize("stretch", [5, 16, 19, 36])
@pytest.mark.parametrize("run", [mla_prefill_reference, mla_prefill_triton])
def test_keys_may_come_stretch_by_stretch(run, stretch, generator, interpreted):
    given = inputs(PROMPTS, generator)
    wanted = exact(given, PROMPTS)
    options = {"config": CONFIG} if run is mla_prefill_triton else {}
    out = poisoned(given)
    for start in range(0, 37, stretch):
        parts = [
            [first, count, position, key + start, min(stretch, keys - start), start]
            for first, count, position, key, keys, _ in PROMPTS
            if keys > start
        ]
        part = replace(given, segments_S6=torch.tensor(parts, dtype=torch.int32))
        run(part, scale=SCALE, **out, **options)
    assert_close((out["out_THv"], out["lse_TH"]), wanted, 1e-5)


def test_a_query_gets_the_same_bits_whatever_it_is_batched_with(generator, interpreted):
    given = inputs(PROMPTS, generator)
    together, _ = attended(mla_prefill_triton, given, config=CONFIG)
    for segment in PROMPTS:
        one = torch.tensor([segment], dtype=torch.int32)
        alone = replace(given, segments_S6=one, most_queries=segment[1])
        out, _ = attended(mla_prefill_triton, alone, config=CONFIG)
        rows = slice(segment[0], segment[0] + segment[1])
        assert torch.equal(out[rows], together[rows])


def test_nothing_beyond_a_segment_is_read(generator, interpreted):
    given = inputs(PROMPTS[:2], generator)
    wanted = exact(given, PROMPTS[:2])
    for tensor in (given.keys_values_NHw, given.key_rotary_NP):
        tensor[:2], tensor[27:] = float("nan"), float("nan")
    for tensor in (given.plain_THn, given.rotary_THP):
        tensor[:1], tensor[20:] = float("nan"), float("nan")
    assert_close(attended(mla_prefill_triton, given, config=CONFIG), wanted, 1e-5)


def test_a_call_without_queries_does_nothing(generator):
    given = replace(inputs(PROMPTS, generator), most_queries=0)
    out = poisoned(given)
    mla_prefill(given, scale=SCALE, **out)
    assert out["out_THv"].isnan().all()
    given = replace(given, most_queries=20)
    mla_prefill(given, scale=SCALE, **out)
    assert_close((out["out_THv"], out["lse_TH"]), exact(given, PROMPTS), 1e-12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"plain_THn": torch.zeros(4, 2, 32, dtype=torch.float16)}, "plain must be"),
        ({"plain_THn": torch.zeros(4, 0, 32)}, "queries and keys must be"),
        ({"plain_THn": torch.zeros(4, 2, 24)}, "power of two of plain numbers"),
        ({"rotary_THP": torch.zeros(4, 2, 8)}, "key_rotary must be"),
        ({"keys_values_NHw": torch.zeros(9, 3, 96)}, "keys must be"),
        ({"keys_values_NHw": torch.zeros(9, 2, 72)}, "power of two of value numbers"),
        ({"keys_values_NHw": torch.zeros(9, 2, 96).bfloat16()}, "keys must be"),
        ({"key_rotary_NP": torch.zeros(8, 16)}, "key_rotary must be"),
        ({"segments_S6": torch.zeros(1, 5, dtype=torch.int32)}, "segments must be"),
        ({"segments_S6": torch.zeros(1, 6)}, "segments must be"),
    ],
)
def test_inputs_that_break_the_contract_are_rejected(change, named):
    good = {
        "plain_THn": torch.zeros(4, 2, 32),
        "rotary_THP": torch.zeros(4, 2, 16),
        "keys_values_NHw": torch.zeros(9, 2, 96),
        "key_rotary_NP": torch.zeros(9, 16),
        "segments_S6": torch.zeros(1, 6, dtype=torch.int32),
        "most_queries": 4,
    }
    PrefillInputs(**good)
    with pytest.raises(KernelInputError, match=named):
        PrefillInputs(**good | change)


def test_outputs_that_do_not_match_are_rejected(generator):
    given = inputs(PROMPTS, generator)
    out = poisoned(given)
    with pytest.raises(KernelInputError, match="out must be"):
        mla_prefill(given, scale=SCALE, **out | {"out_THv": out["out_THv"].bfloat16()})
    with pytest.raises(KernelInputError, match="lse must be"):
        mla_prefill(given, scale=SCALE, **out | {"lse_TH": out["lse_TH"][1:]})

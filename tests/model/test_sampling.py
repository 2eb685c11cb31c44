import itertools
import math

import numpy as np
import pytest
import torch

from equipoise_model import sampling
from equipoise_model.sampling import (
    draw,
    penalize,
    probabilities,
    sample,
    sampling_bytes,
    score,
)
from equipoise_model.sampling_params import SamplingParams, SamplingRow, TokenCounts
from tests.support.live_bytes import LiveBytes

VOCABULARY = 131  # not a multiple of any vector's width


def row(*, prompt=(1, 2), output=(), banned=(), **params):
    return SamplingRow(
        params=SamplingParams(**params),
        position=len(prompt) + len(output),
        counts=TokenCounts(prompt, output),
        banned=banned,
    )


@pytest.fixture
def logits():
    """Ten rows of random logits."""
    torch.manual_seed(0)
    return 3 * torch.randn(10, VOCABULARY)


VARIETY = [
    row(temperature=0.0),
    row(seed=1),
    row(seed=2, temperature=0.7, top_p=0.9),
    row(seed=3, top_k=5, logprobs=3),
    row(seed=4, min_p=0.05, temperature=1.5),
    row(seed=5, repetition_penalty=1.3, output=(3, 4, 4)),
    row(seed=6, presence_penalty=1.0, frequency_penalty=-0.5, output=(9, 9, 9)),
    row(temperature=0.0, frequency_penalty=2.0, output=(5,)),
    row(seed=7, top_k=20, top_p=0.8, min_p=0.02, temperature=0.9, logprobs=0),
    row(seed=2**64 - 1, prompt=(8,) * 50, banned=(3, 7), logit_bias=((5, 2.5), (9, -100.0))),
]


def test_greedy_takes_the_most_likely_token_and_the_lowest_of_several(logits):
    logits[0, 90] = logits[0, 17] = 50.0
    tokens = [one.token for one in sample(logits, [row(temperature=0)] * 10)]
    assert tokens[0] == 17
    assert tokens == logits.argmax(dim=-1).tolist()


def test_a_request_draws_the_same_whatever_else_is_in_the_batch(logits):
    together = sample(logits, VARIETY)
    for index, one in enumerate(VARIETY):
        assert sample(logits[index : index + 1], [one]) == [together[index]]
    order = [9, 0, 4, 2, 2, 7, 5, 8, 1, 3, 6]
    assert sample(logits[order], [VARIETY[i] for i in order]) == [together[i] for i in order]


def test_a_request_draws_the_same_when_its_output_becomes_its_prompt(logits):
    first = sample(logits[:1], [row(seed=5, prompt=(1, 2), output=(3, 4))])
    assert first == sample(logits[:1], [row(seed=5, prompt=(1, 2, 3, 4))])


def test_banned_tokens_are_never_sampled(logits):
    best = logits.argmax(dim=-1).tolist()
    rows = [row(temperature=0, banned=(token, 130)) for token in best]
    second = logits.sort(dim=-1, descending=True).indices[:, 1].tolist()
    assert [one.token for one in sample(logits, rows)] == second
    allowed = 77
    alone = row(temperature=5, banned=tuple(t for t in range(VOCABULARY) if t != allowed))
    assert [one.token for one in sample(logits, [alone] * 10)] == [allowed] * 10


def test_a_bias_shifts_the_odds_by_its_exponential(logits):
    plain = probabilities(logits, [row()] * 10)
    biased = probabilities(logits, [row(logit_bias=((3, 1.5), (8, -2.0)))] * 10)
    before, after = plain[:, 3] / plain[:, 8], biased[:, 3] / biased[:, 8]
    assert torch.allclose(after / before, torch.full((10,), math.exp(3.5)), rtol=1e-4)
    # The logprobs are the model's own.
    (one, *_), (other, *_) = (
        sample(logits, [row(temperature=0, logit_bias=bias, logprobs=3)] * 10)
        for bias in ((), ((11, 100.0),))
    )
    assert (other.token, other.top) == (11, one.top)
    assert other.logprob == pytest.approx(logits[0].log_softmax(dim=-1)[11].item(), abs=1e-5)


def test_known_tokens_are_scored_as_if_they_were_sampled(logits):
    logits[4, :40] = 0.5  # equals, of which the lower tokens come first
    logits[5] = math.nan
    sampled = sample(logits, [row(temperature=0, logprobs=4)] * 10)
    tokens = [one.token for one in sampled]
    assert score(logits, tokens, num_top=[4] * 10) == sampled
    assert score(logits[2:3], tokens[2:3], num_top=[4]) == sampled[2:3]
    assert sampled[5].fault
    for index, one in enumerate(sampled):
        if index != 5:
            expected = logits[index].sort(descending=True, stable=True).indices[:4].tolist()
            assert [token for token, _ in one.top] == expected


def test_other_seeds_and_positions_draw_other_tokens():
    flat = torch.zeros(1, 10_000)
    tokens = {
        sample(flat, [row(seed=seed, prompt=(0,) * length)])[0].token
        for seed, length in itertools.product(range(5), range(1, 6))
    }
    assert len(tokens) > 20


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10_000},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_p": 0.8, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.7, "min_p": 0.05},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers_in_the_order_of_vllm(logits, params):
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    expected = logits.clone()
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("min_p", MinPLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        if name in params:
            expected = warper(params[name])(None, expected)
    torch.testing.assert_close(
        probabilities(logits, [row(**params)] * 10), expected.softmax(dim=-1), atol=1e-6, rtol=0
    )


def test_repetition_is_penalized_as_in_transformers(logits):
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens = torch.tensor([[1, 2, 2, 3]] * 10)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits.clone())
    rows = [row(repetition_penalty=1.7, prompt=(1, 2), output=(2, 3))] * 10
    torch.testing.assert_close(penalize(logits, rows), expected)


def test_presence_and_frequency_are_penalized_in_the_output_only(logits):
    one = row(presence_penalty=0.5, frequency_penalty=0.25, prompt=(1, 2), output=(2, 3, 3))
    expected = logits.clone()
    expected[4, 2] -= 0.5 + 0.25
    expected[4, 3] -= 0.5 + 0.25 * 2
    rows = [row()] * 10
    rows[4] = one
    torch.testing.assert_close(penalize(logits, rows), expected)


def test_drafts_are_penalized_as_if_they_were_output(logits):
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3}
    drafted = row(output=(3, 4, 4), **params).after(4).after(9)
    whole = row(output=(3, 4, 4, 4, 9), **params)
    assert drafted.position == whole.position
    assert torch.equal(penalize(logits, [drafted] * 10), penalize(logits, [whole] * 10))
    assert sample(logits, [drafted] * 10) == sample(logits, [whole] * 10)


def test_rows_without_penalties_do_not_change(logits):
    assert penalize(logits, [row()] * 10) is logits


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"top_p": 0.7},
        {"top_k": 4, "temperature": 2.0},
        {"min_p": 0.2},
    ],
    ids=str,
)
def test_draws_follow_the_requested_distribution(params):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -3.0]])
    count = 20_000
    rows = [
        row(seed=seed, prompt=(0,) * position, **params)
        for position in range(1, 101)
        for seed in range(count // 100)
    ]
    tokens = torch.tensor([one.token for one in sample(logits.expand(count, -1), rows)])
    drawn = tokens.bincount(minlength=7).double()
    expected = probabilities(logits, rows[:1])[0].double() * count
    assert (drawn[expected == 0] == 0).all()
    kept = expected > 0
    # Chi-squared with at most 6 degrees of freedom is below 28 but once in 10,000 times.
    assert ((drawn - expected)[kept] ** 2 / expected[kept]).sum() < 28


def test_top_p_keeps_the_fewest_that_reach_their_share():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.96, 4), (1.0, 4)):
        shares = probabilities(logits, [row(top_p=top_p)])
        assert (shares > 0).sum() == kept
        assert shares.sum().item() == pytest.approx(1)


def test_of_equal_tokens_the_lowest_are_kept():
    shares = probabilities(torch.zeros(1, 9), [row(top_k=3)])
    assert shares.nonzero()[:, 1].tolist() == [0, 1, 2]


def test_extreme_temperatures_have_their_limits(logits):
    cold = probabilities(1e6 * logits, [row(temperature=0.01)] * 10)
    assert torch.equal(cold, probabilities(logits, [row(temperature=0)] * 10))
    hot = probabilities(1e-30 * logits, [row(temperature=100)] * 10)
    torch.testing.assert_close(hot, torch.full_like(hot, 1 / VOCABULARY))


def test_a_draw_is_where_the_sums_pass_the_number():
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert draw(shares.expand(5, -1), numbers).tolist() == [1, 1, 3, 3, 3]
    # Sums need not be 1; rounding up to the whole sum must not lead beyond it.
    assert draw(torch.tensor([[1.5, 1.5, 0.0]]), numbers[-1:]).tolist() == [1]


def test_logarithms_are_those_of_the_models_own_distribution(logits):
    expected = logits.double().log_softmax(dim=-1)
    rows = [
        row(seed=3, temperature=0.3, top_k=2, repetition_penalty=1.5, output=(7,), logprobs=5)
    ] * 10
    for index, one in enumerate(sample(logits, rows)):
        assert one.logprob == pytest.approx(expected[index, one.token].item(), abs=1e-6)
        values, ids = expected[index].topk(5)
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert all(one.top == () for one in sample(logits, [row()] * 10))


def test_masked_tokens_are_never_drawn(logits):
    logits[:, 10:] = -math.inf
    assert all(one.token < 10 for one in sample(logits, VARIETY))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad_row", range(len(VARIETY)))
def test_a_row_without_finite_logits_fails_alone(logits, value, bad_row):
    expected = sample(logits, VARIETY)
    logits[bad_row, 3] = value
    sampled = sample(logits, VARIETY)
    assert "not finite" in sampled.pop(bad_row).fault
    del expected[bad_row]
    assert sampled == expected
    assert not any(one.fault for one in expected)


def test_a_row_fails_alone_whose_penalties_overflow(logits):
    logits[5] = 1e38 * logits[5].sign()
    penalized = row(seed=5, repetition_penalty=0.01, prompt=range(VOCABULARY))
    rows = [*VARIETY[:5], penalized, *VARIETY[6:]]
    faults = [one.fault for one in sample(logits, rows)]
    assert [bool(fault) for fault in faults] == [number == 5 for number in range(10)]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 100.0])
@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_the_ends_of_all_ranges_give_tokens(logits, scale, temperature, penalty):
    chosen = row(
        temperature=temperature,
        top_p=5e-324,
        min_p=5e-324,
        repetition_penalty=penalty,
        frequency_penalty=-2.0,
        output=(3,) * 5000,
    )
    for one in sample(scale * logits, [chosen] * 10):
        assert not one.fault
        assert math.isfinite(one.logprob)


def test_half_precision_logits_and_empty_batches_are_fine(logits):
    assert sample(logits[:0], []) == []
    half = logits.bfloat16()
    assert sample(half, VARIETY) == sample(half.float(), VARIETY)


def test_parts_of_a_batch_give_what_the_whole_gives(logits, monkeypatch):
    sampled = sample(logits, VARIETY)
    scored = score(logits, range(10), num_top=[2] * 10)
    for most_rows in (1, 3, 10):
        monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", most_rows * VOCABULARY)
        assert sample(logits, VARIETY) == sampled
        assert score(logits, range(10), num_top=[2] * 10) == scored
    assert sample(logits[:0], []) == score(logits[:0], [], num_top=[]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(5, 32_000), (16, 4099), (48, 4099)])
def test_sampling_takes_the_memory_that_is_charged(num_rows, num_tokens, dtype, monkeypatch):
    # Of the last size, a third is sampled at once.
    monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", 16 * 4099 if num_tokens == 4099 else 2**23)
    allowed = np.full((num_tokens + 31) // 32, -1, dtype=np.int32)
    everything = SamplingRow(
        params=SamplingParams(
            temperature=0.8,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.2,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            logprobs=20,
            logit_bias=((7, 1.5),),
        ),
        position=9,
        counts=TokenCounts(range(6), range(3)),
        banned=(3,),
        allowed=allowed,
    )
    logits = torch.randn(num_rows, num_tokens).to(dtype)
    charged = sampling_bytes(num_rows, num_tokens)
    with LiveBytes() as live:
        sample(logits, [everything] * num_rows)
    # CUDA's sort takes more than the tensors that show here.
    assert charged / 2 < live.peak <= charged
    with LiveBytes() as live:
        score(logits, range(num_rows), num_top=[20] * num_rows)
    assert live.peak <= charged

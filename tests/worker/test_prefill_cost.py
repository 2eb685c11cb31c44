"""What prefill costs is found in the times of steps, or admitted to be unknown."""

import random

import pytest

from equipoise.worker.prefill_cost import MIN_STEPS, PrefillCostFit
from equipoise.worker.sequence import Chunk, PrefillWork, StepPlan

FIXED_S, TOKEN_S, PARITY = 3e-3, 2e-6, 6_000


def plan(num_tokens, start):
    chunk = Chunk(key=1, blocks=(), start=start, known=tuple(range(num_tokens)))
    return StepPlan(chunks=(chunk,))


def fitted(seed, *, count=200, noise=0.02, stalls=0.05, longest=30_000, own_share=0.4):
    rng = random.Random(seed)
    fit = PrefillCostFit()
    for _ in range(count):
        tokens, start = rng.randrange(64, 2048), rng.randrange(0, longest)
        mean = rng.uniform(500, 1500)
        pairs = PrefillWork.of(tokens, start=start).pairs
        linear = own_share * tokens + (1 - own_share) * mean
        busy_s = FIXED_S + TOKEN_S * (linear + pairs / PARITY)
        busy_s *= 1 + noise * rng.gauss(0, 1)
        if rng.random() < stalls:
            busy_s *= rng.uniform(2, 10)
        fit.add(plan(tokens, start), mean_tokens=mean, busy_s=busy_s)
    return fit.parity_tokens


def test_pairs_per_token_are_found_in_noisy_steps_that_sometimes_stall():
    found = [fitted(seed) for seed in range(20)]
    assert all(one == pytest.approx(PARITY, rel=0.25) for one in found), found
    assert sum(found) / len(found) == pytest.approx(PARITY, rel=0.05)


def test_the_ranks_experts_count_although_they_run_tokens_of_others():
    one_rank = PrefillCostFit()
    for turn in range(100):
        tokens, start = 64 + 37 * turn % 1900, 997 * turn % 30_000
        seconds = TOKEN_S * (tokens + PrefillWork.of(tokens, start=start).pairs / PARITY)
        one_rank.add(plan(tokens, start), mean_tokens=tokens, busy_s=seconds)
    assert one_rank.parity_tokens == pytest.approx(PARITY, rel=0.01)
    assert fitted(1, own_share=0.1) == pytest.approx(PARITY, rel=0.25)


def test_steps_that_show_nothing_leave_it_unknown():
    assert fitted(0, count=MIN_STEPS - 1) == 0
    assert fitted(0, noise=3.0) == 0
    alike = PrefillCostFit()
    for turn in range(100):
        alike.add(plan(512, 0), mean_tokens=512.0, busy_s=0.001 + 1e-6 * (turn % 7))
    assert alike.parity_tokens == 0


def test_steps_without_prompts_are_not_counted():
    fit = PrefillCostFit()
    for turn in range(100):
        fit.add(plan(1, 100 * turn), mean_tokens=1.0, busy_s=0.001 * (1 + turn))
        fit.add(StepPlan(chunks=()), mean_tokens=1.0, busy_s=0.001)
    assert fit.parity_tokens == 0

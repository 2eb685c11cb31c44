"""Where a plan is cut, and what a group's headers say about it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.worker.micro_batches import num_second
from equipoise.worker.sequence import Chunk, StepPlan
from equipoise.worker.step_inputs import tokens_by_batch
from tests.worker.test_header import header


def plan_of(*chunks):
    """A plan of (first position, tokens) pairs."""
    return StepPlan(
        chunks=tuple(
            Chunk(key=key, blocks=(), start=start, known=(0,) * length)
            for key, (start, length) in enumerate(chunks)
        )
    )


@pytest.mark.parametrize(
    ("chunks", "second"),
    [
        ([], 0),
        ([(0, 1)], 0),
        ([(0, 2)], 1),
        ([(0, 64)], 32),  # inside a sequence
        ([(0, 1)] * 7, 4),
        ([(1000, 1), (0, 1), (0, 1), (0, 1)], 3),  # a long context is a half of its own
        ([(0, 1), (0, 1), (0, 1), (1000, 1)], 1),
    ],
)
def test_halves_take_about_the_same_time(chunks, second):
    parity = 100 if (1000, 1) in chunks else 10**9
    assert num_second(plan_of(*chunks), least_tokens=2, parity_tokens=parity) == second


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(1, 1000),
)
def test_no_other_cut_has_a_smaller_larger_half(chunks, parity):
    plan = plan_of(*chunks)
    costs = [1 + at / parity for start, length in chunks for at in range(start, start + length)]
    second = num_second(plan, least_tokens=2, parity_tokens=parity)
    if len(costs) == 1:
        assert second == 0
        return
    larger = [max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs))]
    assert larger[len(costs) - second - 1] <= min(larger) * (1 + 1e-9)


def test_plans_below_the_threshold_and_without_one_stay_whole():
    plan = plan_of((0, 8))
    assert num_second(plan, least_tokens=9, parity_tokens=100) == 0
    assert num_second(plan, least_tokens=8, parity_tokens=100) > 0
    assert num_second(plan, least_tokens=0, parity_tokens=100) == 0


def test_a_step_is_cut_if_any_rank_cuts_it():
    whole = (header(num_tokens=3), header(num_tokens=0), header(num_tokens=1))
    assert tokens_by_batch(whole) == [[3, 0, 1]]
    cut = (header(num_tokens=3, num_second=2), *whole[1:])
    assert tokens_by_batch(cut) == [[1, 0, 1], [2, 0, 0]]

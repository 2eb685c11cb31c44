import json
import math
from dataclasses import replace

import pytest

from equipoise.cli.demo.result import (
    DemoResult,
    Latency,
    SwitchFigures,
    compare_tokens,
    recovery_of,
    split_latency,
    steps_of_two_generations,
    switches_of,
    windows_of,
)
from equipoise.cli.demo.traffic import Completion, Prompt, TimeSpan, TokenArrival
from equipoise_api.v1 import status_pb2

PROMPT = Prompt(domain="code", tokens=(1, 2, 3), max_tokens=3)


def windows(*max_over_mean: float) -> list[status_pb2.WindowStatus]:
    """Windows that close at 1, 2, 3, ... seconds."""
    return [
        status_pb2.WindowStatus(
            closed_unix_s=float(i), balancedness=1 / value, max_over_mean=value, generation=1
        )
        for i, value in enumerate(max_over_mean, start=1)
    ]


def shift(*max_over_mean: float, at_s: float = 2.5, until_s: float = 100.0):
    return recovery_of(
        windows(*max_over_mean),
        from_domain="code",
        to_domain="arithmetic",
        at_s=at_s,
        until_s=until_s,
    )


def completion(tokens, *, generation=1, first_step=0, failure=None) -> Completion:
    return Completion(
        prompt=PROMPT,
        rank=0,
        arrivals=tuple(
            TokenArrival(
                time_s=float(i), tokens=(token,), generation=generation, step=first_step + i
            )
            for i, token in enumerate(tokens)
        ),
        failure=failure,
    )


def outcome(**changes) -> DemoResult:
    latency = Latency(p50_ms=40.0, p95_ms=50.0, p99_ms=80.0, samples=1000)
    good = DemoResult(
        shifts=(shift(1.1, 1.1, 1.5, 1.1), shift(1.1, 1.15, 1.8, 1.3, 1.18)),
        switches=(
            SwitchFigures(
                generation=2,
                span=TimeSpan(1.0, 1.4),
                stall_ms=3.0,
                median_step_ms=40.0,
                moves=12,
            ),
        ),
        rollouts=1,
        decisions=9,
        generation=2,
        requests=10,
        failures=(),
        tokens_compared=300,
        tokens_identical=300,
        steps_of_two_generations=0,
        quiet=latency,
        during_rollout=replace(latency, p95_ms=60.0),
        tokens_per_s=400.0,
        peak_memory_bytes=2**30,
        wall_s=100.0,
    )
    return replace(good, **changes)


def test_recovery_is_counted_in_windows_from_the_shift():
    found = shift(1.6, 1.1, 1.7, 1.05, 1.1, 1.08)
    assert found.intervals_to_recover == 2
    assert found.max_over_mean_before == pytest.approx(1.1)
    assert found.max_over_mean_after == pytest.approx(1.7)
    assert found.max_over_mean_recovered == pytest.approx(1.08)


def test_a_first_window_diluted_by_running_requests_is_no_recovery():
    found = shift(1.1, 1.1, 1.15, 1.7, 1.1)
    assert found.max_over_mean_after == pytest.approx(1.7)
    assert found.intervals_to_recover == 3


def test_balance_that_stays_away_is_no_recovery():
    found = shift(1.1, 1.1, 1.7, 1.5, 1.4)
    assert found.intervals_to_recover is None
    assert found.max_over_mean_recovered == pytest.approx(1.45)


def test_windows_of_the_next_domain_do_not_count_for_this_shift():
    assert shift(1.1, 1.1, 1.7, 1.6, 1.1, until_s=4.5).intervals_to_recover is None


def test_a_shift_without_windows_is_not_recovered_and_not_measured():
    found = shift()
    assert found.intervals_to_recover is None
    assert math.isnan(found.max_over_mean_after)


def test_tokens_are_compared_one_by_one_at_their_place():
    references = {PROMPT: (7, 8, 9)}
    assert compare_tokens([completion((7, 8, 9))], references) == (3, 3)
    broken = completion((7,), failure="its rank died")
    assert compare_tokens([completion((7, 9, 9)), broken], references) == (4, 3)


def test_a_token_beyond_the_reference_is_a_difference():
    assert compare_tokens([completion((7, 8, 9, 1))], {PROMPT: (7, 8, 9)}) == (4, 3)


def test_a_token_that_never_came_is_a_difference():
    assert compare_tokens([completion((7, 8))], {PROMPT: (7, 8, 9)}) == (3, 2)


def test_a_step_that_two_ranks_report_with_different_generations_is_found():
    earlier = completion((7, 8, 9), generation=1, first_step=10)
    later = completion((7, 8, 9), generation=2, first_step=13)
    assert steps_of_two_generations([earlier, later]) == 0
    crossing = completion((7, 8), generation=2, first_step=12)
    assert steps_of_two_generations([earlier, later, crossing]) == 1


def test_latencies_in_a_rollout_are_compared_with_those_beside_it():
    ended_s = {5.9: 50, 6.1: 10, 9.1: 50, 10.01: 30, 11.0: 30, 11.9: 50, 12.1: 20, 15.1: 50}
    gaps = [TimeSpan(to_s - ms / 1e3, to_s) for to_s, ms in ended_s.items()]
    beside, during = split_latency(gaps, [TimeSpan(10.0, 11.0)])
    assert (beside.samples, during.samples) == (2, 2)
    assert beside.p50_ms == pytest.approx(15)
    assert during.p99_ms == pytest.approx(30)


def test_without_a_rollout_there_is_nothing_to_compare():
    beside, during = split_latency([TimeSpan(0.0, 0.01)], [])
    assert (beside.samples, during.samples) == (0, 0)
    assert math.isnan(during.p95_ms)


def test_a_good_run_has_no_faults():
    assert outcome().faults == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": ("rank 1: UNAVAILABLE: gone",)}, "1 requests failed; the first: rank 1"),
        ({"tokens_identical": 299}, "1 of 300 tokens differ"),
        ({"tokens_compared": 0, "tokens_identical": 0}, "no token was compared"),
        ({"steps_of_two_generations": 2}, "2 steps ran with two generations"),
        ({"rollouts": 0}, "no layout was rolled out"),
        ({"shifts": (shift(1.1, 1.1, 1.7, 1.5),)}, "did not recover after code to arithmetic"),
    ],
)
def test_everything_that_must_not_happen_is_a_fault(changes, words):
    (fault,) = outcome(**changes).faults
    assert words in fault


def test_the_document_says_the_least_favourable_of_all_shifts():
    document = outcome().to_json()
    assert document["balancedness_before_shift"] == pytest.approx(1 / 1.15)
    assert document["balancedness_after_shift"] == pytest.approx(1 / 1.5)
    assert document["balancedness_recovered"] == pytest.approx(1 / 1.18)
    assert document["intervals_to_recover"] == 3
    assert document["p95_inter_token_ratio_during_rollout"] == pytest.approx(1.2)
    assert document["max_switch_stall_ms"] == 3.0
    assert document["median_step_ms"] == 40.0


def test_the_document_is_json_even_when_nothing_was_measured():
    nothing = Latency(p50_ms=math.nan, p95_ms=math.nan, p99_ms=math.nan, samples=0)
    document = outcome(shifts=(shift(),), switches=(), quiet=nothing, during_rollout=nothing)
    written = json.loads(json.dumps(document.to_json(), allow_nan=False))
    assert written["p95_inter_token_ratio_during_rollout"] is None
    assert written["max_switch_stall_ms"] is None
    assert written["intervals_to_recover"] is None


def test_windows_are_ordered_by_closing_time_without_empty_ones():
    windows = [
        status_pb2.WindowStatus(
            closed_unix_s=8.0, balancedness=0.5, max_over_mean=2.1, assignments=10, generation=2
        ),
        status_pb2.WindowStatus(
            closed_unix_s=4.0, balancedness=0.9, max_over_mean=1.1, assignments=10, generation=1
        ),
        status_pb2.WindowStatus(closed_unix_s=1.0, balancedness=1.0, assignments=0),
    ]
    assert windows_of(windows) == [windows[1], windows[0]]


def test_a_switch_spans_from_staging_to_the_last_switched_message():
    (switch,) = switches_of(
        [
            status_pb2.SwitchStatus(
                generation=3,
                max_stall_us=1500,
                median_step_us=40_000,
                moves=7,
                staging_s=2.0,
                time_unix_s=100.0,
            )
        ]
    )
    assert switch.span.to_s == 100.0
    assert switch.span.from_s < 98.0
    assert (switch.stall_ms, switch.median_step_ms) == pytest.approx((1.5, 40.0))

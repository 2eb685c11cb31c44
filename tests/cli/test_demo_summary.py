import math
from dataclasses import replace

import pytest
from rich.console import Console

from equipoise.cli.demo.result import DemoResult, DomainShift, Latency, SwitchFigures
from equipoise.cli.demo.summary import summary
from equipoise.cli.demo.traffic import TimeSpan

SHIFT = DomainShift(
    from_domain="code",
    to_domain="arithmetic",
    at_s=1.0,
    max_over_mean_before=1.05,
    max_over_mean_after=1.61,
    max_over_mean_recovered=1.08,
    balancedness_before=0.95,
    balancedness_after=0.62,
    balancedness_recovered=0.92,
    intervals_to_recover=2,
)
LATENCY = Latency(p50_ms=40.0, p95_ms=50.0, p99_ms=80.0, samples=1000)
GOOD = DemoResult(
    shifts=(SHIFT,),
    switches=(
        SwitchFigures(
            generation=2, span=TimeSpan(1.0, 1.4), stall_ms=3.0, median_step_ms=40.0, moves=12
        ),
    ),
    rollouts=1,
    decisions=9,
    generation=2,
    requests=1000,
    failures=(),
    tokens_compared=21_000,
    tokens_identical=21_000,
    steps_of_two_generations=0,
    quiet=LATENCY,
    during_rollout=LATENCY,
    tokens_per_s=400.0,
    peak_memory_bytes=2**30,
    wall_s=100.0,
)


def printed(outcome: DemoResult) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(summary(outcome))
    return capture.get()


def test_a_good_run_meets_every_target():
    text = printed(GOOD)
    assert "1.05, then 1.61, after 2 intervals 1.08" in text
    assert "21,000 of 21,000" in text
    assert " no " not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"shifts": (replace(SHIFT, intervals_to_recover=3),)},
        {"shifts": (replace(SHIFT, intervals_to_recover=None),)},
        {"shifts": (replace(SHIFT, max_over_mean_recovered=1.25),)},
        {"failures": ("rank 0: UNAVAILABLE",)},
        {"tokens_identical": 20_999},
        {"tokens_identical": 100, "tokens_compared": 100},
        {"steps_of_two_generations": 1},
        {"switches": (replace(GOOD.switches[0], stall_ms=21.0),)},
        {"during_rollout": replace(LATENCY, p95_ms=63.0)},
        {"during_rollout": replace(LATENCY, p95_ms=math.nan)},
        {"peak_memory_bytes": 6 * 2**30},
        {"wall_s": 181.0},
    ],
)
def test_every_target_can_be_missed(changes):
    assert printed(replace(GOOD, **changes)).count(" no ") == 1


def test_a_shift_without_recovery_says_where_balance_stayed():
    lost = replace(SHIFT, intervals_to_recover=None, max_over_mean_recovered=1.55)
    assert "then 1.61, not recovered: 1.55" in printed(replace(GOOD, shifts=(lost,)))

"""The table a demo ends with: every figure beside what it should be."""

import math
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from equipoise.cli.demo.outcome import (
    DRIFTED_MAX_OVER_MEAN,
    RECOVERED_MAX_OVER_MEAN,
    DomainShift,
    Latency,
    Outcome,
)

GIB = 2**30


def summary(outcome: Outcome) -> RenderableType:
    """Every figure beside what it should be."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    table.add_column("measured")
    table.add_column("target")
    table.add_column("")
    for what, measured, target, met in _rows(outcome):
        verdict = Text("") if met is None else Text(*(("yes", "green") if met else ("no", "red")))
        table.add_row(what, measured, target, verdict)
    return table


class Row(NamedTuple):
    """A figure beside its target; `met` is None where there is no target."""

    what: str
    measured: str
    target: str = ""
    met: bool | None = None


def _rows(outcome: Outcome) -> list[Row]:
    return [
        *(_shift(shift) for shift in outcome.shifts),
        *_correctness(outcome),
        *_speed(outcome),
        Row("rollouts", f"{outcome.rollouts}, to generation {outcome.generation}"),
        Row("moves", f"{sum(switch.moves for switch in outcome.switches)}"),
        Row("decisions", f"{outcome.decisions}"),
        Row(
            "peak memory, all processes",
            f"{outcome.peak_memory_bytes / GIB:.2f} GiB",
            "below 6 GiB",
            outcome.peak_memory_bytes < 6 * GIB,
        ),
        Row("wall time", f"{outcome.wall_s:.0f} s", "at most 180 s", outcome.wall_s <= 180),
    ]


def _shift(shift: DomainShift) -> Row:
    intervals = shift.intervals_to_recover
    return Row(
        f"rank max/mean, {shift.from_domain} to {shift.to_domain}",
        f"{shift.max_over_mean_before:.2f}, then {shift.max_over_mean_after:.2f}, "
        + ("and not back: " if intervals is None else f"after {intervals} intervals ")
        + f"{shift.max_over_mean_recovered:.2f}",
        f"from {DRIFTED_MAX_OVER_MEAN} or more to {RECOVERED_MAX_OVER_MEAN} in 2 intervals",
        shift.max_over_mean_after >= DRIFTED_MAX_OVER_MEAN
        and intervals is not None
        and intervals <= 2
        and shift.max_over_mean_recovered <= RECOVERED_MAX_OVER_MEAN,
    )


def _correctness(outcome: Outcome) -> list[Row]:
    return [
        Row(
            "failed requests",
            f"{len(outcome.failures)} of {outcome.requests:,}",
            "none",
            not outcome.failures,
        ),
        Row(
            "tokens as without a balancer",
            f"{outcome.tokens_identical:,} of {outcome.tokens_compared:,}",
            "all, of 20,000 or more",
            outcome.tokens_identical == outcome.tokens_compared >= 20_000,
        ),
        Row(
            "steps of two generations",
            f"{outcome.steps_of_two_generations}",
            "none",
            outcome.steps_of_two_generations == 0,
        ),
    ]


def _speed(outcome: Outcome) -> list[Row]:
    stall_ms = max((switch.stall_ms for switch in outcome.switches), default=math.nan)
    stall_share = max(
        (switch.stall_ms / switch.median_step_ms for switch in outcome.switches), default=math.nan
    )
    quiet, during = outcome.quiet, outcome.during_rollout
    return [
        Row(
            "longest switch",
            f"{stall_ms:.1f} ms, {stall_share:.2f} of a step",
            "at most 0.5 of a step",
            stall_share <= 0.5,
        ),
        Row("inter-token p50, p95, p99, quiet", _percentiles(quiet)),
        Row("the same during rollouts", _percentiles(during)),
        Row(
            "p95 during rollouts over quiet",
            f"{outcome.p95_ratio:.2f}",
            "at most 1.25",
            outcome.p95_ratio <= 1.25,
        ),
        Row("tokens generated per second", f"{outcome.tokens_per_s:.0f}"),
    ]


def _percentiles(latency: Latency) -> str:
    return f"{latency.p50_ms:.0f}, {latency.p95_ms:.0f}, {latency.p99_ms:.0f} ms"

"""The table that ends a demo: every figure and its target."""

import math
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from equipoise.cli.demo.result import (
    RECOVERED_MAX_OVER_MEAN,
    DemoResult,
    DomainShift,
    Latency,
)

GIB = 2**30


def summary(result: DemoResult) -> RenderableType:
    """A table of every figure and its target."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure")
    table.add_column("measured")
    table.add_column("target")
    table.add_column("")
    for name, measured, target, met in _rows(result):
        verdict = Text("") if met is None else Text(*(("yes", "green") if met else ("no", "red")))
        table.add_row(name, measured, target, verdict)
    return table


class Row(NamedTuple):
    """A figure and its target; `met` is None without a target."""

    name: str
    measured: str
    target: str = ""
    met: bool | None = None


def _rows(result: DemoResult) -> list[Row]:
    stall_ms = max((switch.stall_ms for switch in result.switches), default=math.nan)
    stall_share = max(
        (switch.stall_ms / switch.median_step_ms for switch in result.switches), default=math.nan
    )
    quiet, during = result.quiet, result.during_rollout
    return [
        *(_shift(shift) for shift in result.shifts),
        Row(
            "failed requests",
            f"{len(result.failures)} of {result.requests:,}",
            "none",
            not result.failures,
        ),
        Row(
            "tokens equal to the reference",
            f"{result.tokens_identical:,} of {result.tokens_compared:,}",
            "all, of 20,000 or more",
            result.tokens_identical == result.tokens_compared >= 20_000,
        ),
        Row(
            "steps with two generations",
            f"{result.steps_of_two_generations}",
            "none",
            result.steps_of_two_generations == 0,
        ),
        Row(
            "longest switch",
            f"{stall_ms:.1f} ms, {stall_share:.2f} of a step",
            "at most 0.5 of a step",
            stall_share <= 0.5,
        ),
        Row("inter-token p50, p95, p99, beside rollouts", _percentiles(quiet)),
        Row("inter-token p50, p95, p99, in rollouts", _percentiles(during)),
        Row(
            "p95 in rollouts / beside rollouts",
            f"{result.p95_ratio:.2f}",
            "at most 1.25",
            result.p95_ratio <= 1.25,
        ),
        Row("tokens generated per second", f"{result.tokens_per_s:.0f}"),
        Row("rollouts", f"{result.rollouts}, to generation {result.generation}"),
        Row("moves", f"{sum(switch.moves for switch in result.switches)}"),
        Row("decisions", f"{result.decisions}"),
        Row(
            "peak memory, all processes",
            f"{result.peak_memory_bytes / GIB:.2f} GiB",
            "below 6 GiB",
            result.peak_memory_bytes < 6 * GIB,
        ),
        Row("wall time", f"{result.wall_s:.0f} s", "at most 180 s", result.wall_s <= 180),
    ]


def _shift(shift: DomainShift) -> Row:
    intervals = shift.intervals_to_recover
    return Row(
        f"rank max/mean, {shift.from_domain} to {shift.to_domain}",
        f"{shift.max_over_mean_before:.2f}, then {shift.max_over_mean_after:.2f}, "
        + ("not recovered: " if intervals is None else f"after {intervals} intervals ")
        + f"{shift.max_over_mean_recovered:.2f}",
        f"{RECOVERED_MAX_OVER_MEAN} in 2 intervals",
        intervals is not None
        and intervals <= 2
        and shift.max_over_mean_recovered <= RECOVERED_MAX_OVER_MEAN,
    )


def _percentiles(latency: Latency) -> str:
    return f"{latency.p50_ms:.0f}, {latency.p95_ms:.0f}, {latency.p99_ms:.0f} ms"

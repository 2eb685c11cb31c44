"""`DemoResult`: a demo's figures, computed from its records. Pure; times are Unix seconds.

The main figure is **rank max/mean** of a window: in each MoE layer the load of the busiest rank
over the mean of all ranks, averaged over layers; 1.0 is perfect balance. Balancedness is the mean
over layers of mean/max, so roughly its reciprocal. The balancer computes both from what the
receiving ranks counted.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from equipoise.cli.demo.traffic import Completion, Prompt, TimeSpan
from equipoise_api.v1 import status_pb2

RECOVERED_MAX_OVER_MEAN = 1.2
"""A pool has recovered when its busiest rank carries at most this many times the mean."""

DRIFTED_MAX_OVER_MEAN = 1.4
"""A pool is out of balance when its busiest rank carries at least this many times the mean."""

_SETTLING_S, _BESIDE_S = 1.0, 4.0
"""Tokens that came between these times before or after a rollout are what it is compared with.

Rollouts follow shifts of traffic, so a whole run has another load. Closer ones saw the planning.
"""

_SWITCH_REPORT_S = 0.25
"""From the last Staged to the last Switched message: about one step and one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchFigures:
    """One switch of layouts, as the ranks reported it."""

    generation: int
    """Generation switched to."""
    span: TimeSpan
    """From the first Stage message to the last rank's Switched message."""
    stall_ms: float
    """Longest stall of a rank."""
    median_step_ms: float
    """Median step time."""
    moves: int
    """Experts copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainShift:
    """One abrupt change of traffic and the pool's recovery.

    `before` is the last window closed before the shift. `after` is the worse of the first two that
    closed after it, because requests in flight dilute the first. `recovered` is the median from the
    first recovered window to the end of the domain's traffic, or of all later windows without
    recovery.
    """

    from_domain: str
    """Kind of text before the shift."""
    to_domain: str
    """Kind of text after the shift."""
    at_s: float
    """Time of the shift."""
    max_over_mean_before: float
    """Rank max/mean before."""
    max_over_mean_after: float
    """Rank max/mean after."""
    max_over_mean_recovered: float
    """Rank max/mean once recovered."""
    balancedness_before: float
    """Balancedness before."""
    balancedness_after: float
    """Balancedness after."""
    balancedness_recovered: float
    """Balancedness once recovered."""
    intervals_to_recover: int | None
    """Windows from the shift to the first one at or below `RECOVERED_MAX_OVER_MEAN` that follows
    the `after` window, inclusive; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Inter-token latency, milliseconds; NaN without a sample."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The figures of a run."""

    shifts: tuple[DomainShift, ...]
    """Changes of traffic, in order."""
    switches: tuple[SwitchFigures, ...]
    """Switches of layouts, in order."""
    rollouts: int
    """Rollouts completed."""
    decisions: int
    """Decisions made."""
    generation: int
    """Final generation."""
    requests: int
    """Requests sent."""
    failures: tuple[str, ...]
    """Reason of each failed request."""
    tokens_compared: int
    """Tokens compared with the reference."""
    tokens_identical: int
    """Tokens equal to the reference."""
    steps_of_two_generations: int
    """Steps that ranks ran with different generations."""
    quiet: Latency
    """Inter-token latency beside rollouts."""
    during_rollout: Latency
    """Inter-token latency during rollouts."""
    tokens_per_s: float
    """Tokens generated per second."""
    peak_memory_bytes: int
    """Peak resident memory of all processes."""
    wall_s: float
    """Duration of the demo."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the run failed, one sentence each; empty on success."""
        faults = []
        if self.failures:
            faults.append(f"{len(self.failures)} requests failed; the first: {self.failures[0]}")
        if self.tokens_identical != self.tokens_compared:
            faults.append(
                f"{self.tokens_compared - self.tokens_identical} of {self.tokens_compared} tokens "
                f"differ from the same requests without a balancer"
            )
        if not self.tokens_compared:
            faults.append("no token was compared: the traffic was too short")
        if self.shifts and not self.rollouts:
            faults.append("no layout was rolled out although the traffic shifted")
        if self.steps_of_two_generations:
            faults.append(f"{self.steps_of_two_generations} steps ran with two generations")
        faults += [
            f"balance did not recover after {shift.from_domain} to {shift.to_domain}: "
            f"rank max/mean stayed at {shift.max_over_mean_recovered:.2f}, "
            f"above {RECOVERED_MAX_OVER_MEAN}"
            for shift in self.shifts
            if shift.intervals_to_recover is None
        ]
        return tuple(faults)

    @property
    def p95_ratio(self) -> float:
        """p95 inter-token latency during rollouts over that beside them."""
        return self.during_rollout.p95_ms / self.quiet.p95_ms

    def to_json(self) -> dict[str, Any]:
        """The document for --json; figures over all shifts are the worst of them."""
        shifts, switches = self.shifts, self.switches
        recoveries = [s.intervals_to_recover for s in shifts if s.intervals_to_recover is not None]
        all_recovered = len(recoveries) == len(shifts)
        document: dict[str, Any] = {
            "balancedness_before_shift": min((s.balancedness_before for s in shifts), default=None),
            "balancedness_after_shift": max((s.balancedness_after for s in shifts), default=None),
            "balancedness_recovered": min((s.balancedness_recovered for s in shifts), default=None),
            "intervals_to_recover": max(recoveries, default=None) if all_recovered else None,
            "rollouts": self.rollouts,
            "failed_requests": len(self.failures),
            "tokens_identical": self.tokens_identical,
            "tokens_compared": self.tokens_compared,
            "max_switch_stall_ms": max((s.stall_ms for s in switches), default=None),
            "median_step_ms": _median(s.median_step_ms for s in switches),
            "p95_inter_token_ratio_during_rollout": self.p95_ratio,
            "shifts": [asdict(shift) for shift in shifts],
            "switches": [asdict(switch) for switch in switches],
            "inter_token_ms": {
                "quiet": asdict(self.quiet),
                "during_rollout": asdict(self.during_rollout),
            },
            "steps_of_two_generations": self.steps_of_two_generations,
            "requests": self.requests,
            "decisions": self.decisions,
            "generation": self.generation,
            "tokens_per_s": self.tokens_per_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "wall_s": self.wall_s,
            "faults": list(self.faults),
        }
        # JSON has no NaN: null stands for a missing measurement.
        plain: dict[str, Any] = json.loads(json.dumps(document), parse_constant=lambda _: None)
        return plain


def recovery_of(
    windows: Sequence[status_pb2.WindowStatus],
    *,
    from_domain: str,
    to_domain: str,
    at_s: float,
    until_s: float,
) -> DomainShift:
    """The pool's recovery from one shift, from windows in the order they closed."""
    before = [window for window in windows if window.closed_unix_s <= at_s][-1:]
    later = [window for window in windows if at_s < window.closed_unix_s <= until_s]
    ratios = [window.max_over_mean for window in later]
    worst = int(np.argmax(ratios[:2])) if ratios else 0
    recovered = next(
        (i for i in range(worst + 1, len(ratios)) if ratios[i] <= RECOVERED_MAX_OVER_MEAN), None
    )
    after = later[worst : worst + 1]
    settled = later[worst + 1 if recovered is None else recovered :]
    return DomainShift(
        from_domain=from_domain,
        to_domain=to_domain,
        at_s=at_s,
        max_over_mean_before=_median(window.max_over_mean for window in before),
        max_over_mean_after=_median(window.max_over_mean for window in after),
        max_over_mean_recovered=_median(window.max_over_mean for window in settled),
        balancedness_before=_median(window.balancedness for window in before),
        balancedness_after=_median(window.balancedness for window in after),
        balancedness_recovered=_median(window.balancedness for window in settled),
        intervals_to_recover=None if recovered is None else recovered + 1,
    )


def compare_tokens(
    completions: Iterable[Completion], references: Mapping[Prompt, Sequence[int]]
) -> tuple[int, int]:
    """Count the tokens compared, and those that equal the reference at their position.

    A missing or an extra token of a successful request counts as different; a failed request is
    compared as far as it got.
    """
    compared = identical = 0
    for completion in completions:
        ours, theirs = completion.tokens, tuple(references[completion.prompt])
        if completion.failure is not None:
            theirs = theirs[: len(ours)]
        compared += max(len(ours), len(theirs))
        identical += sum(our == their for our, their in zip(ours, theirs, strict=False))
    return compared, identical


def steps_of_two_generations(completions: Iterable[Completion]) -> int:
    """Number of steps that ranks, which share a step count, reported with several generations."""
    generation_of_step: dict[int, int] = {}
    mixed: set[int] = set()
    for completion in completions:
        for arrival in completion.arrivals:
            seen = generation_of_step.setdefault(arrival.step, arrival.generation)
            if seen != arrival.generation:
                mixed.add(arrival.step)
    return len(mixed)


def split_latency(
    gaps: Sequence[TimeSpan], rollouts: Sequence[TimeSpan]
) -> tuple[Latency, Latency]:
    """Inter-token latency a few seconds beside rollouts, and in them; by when a gap ended."""
    ends_s = np.array([gap.to_s for gap in gaps])
    lengths_s = ends_s - [gap.from_s for gap in gaps]
    apart_s = np.full(len(gaps), np.inf)
    for span in rollouts:
        apart_s = np.minimum(apart_s, np.maximum(span.from_s - ends_s, ends_s - span.to_s))
    is_beside = (apart_s > _SETTLING_S) & (apart_s <= _BESIDE_S)
    return latency(lengths_s[is_beside]), latency(lengths_s[apart_s <= 0])


def latency(lengths_s: np.ndarray[Any, np.dtype[np.float64]]) -> Latency:
    """Percentiles of latencies in seconds."""
    if not lengths_s.size:
        return Latency(p50_ms=math.nan, p95_ms=math.nan, p99_ms=math.nan, samples=0)
    p50, p95, p99 = (float(value) for value in np.percentile(lengths_s * 1e3, (50, 95, 99)))
    return Latency(p50_ms=p50, p95_ms=p95, p99_ms=p99, samples=int(lengths_s.size))


def _median(values: Iterable[float]) -> float:
    """The median; NaN without values."""
    known = list(values)
    return float(np.median(known)) if known else math.nan


def windows_of(windows: Iterable[status_pb2.WindowStatus]) -> list[status_pb2.WindowStatus]:
    """The windows that had traffic, in the order they closed."""
    busy = [window for window in windows if window.assignments]
    return sorted(busy, key=lambda window: window.closed_unix_s)


def switches_of(switches: Iterable[status_pb2.SwitchStatus]) -> tuple[SwitchFigures, ...]:
    """Records of switches, by generation."""
    return tuple(
        SwitchFigures(
            generation=switch.generation,
            span=TimeSpan(
                switch.time_unix_s - switch.staging_s - _SWITCH_REPORT_S, switch.time_unix_s
            ),
            stall_ms=switch.max_stall_us / 1e3,
            median_step_ms=switch.median_step_us / 1e3,
            moves=switch.moves,
        )
        for switch in sorted(switches, key=lambda switch: switch.generation)
    )

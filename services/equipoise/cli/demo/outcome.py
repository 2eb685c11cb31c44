"""`Outcome`: what a demo run showed, computed from its records alone.

Owns every figure's definition. Pure: no I/O, no clock; times are seconds since 1970.

The figure people look for is **rank max/mean** of a window: in each MoE layer, the tokens that the
busiest rank received over the mean of all ranks, and of that the mean over layers; 1.0 when all
carry the same. Balancedness is the mean over layers of mean/max, so about one over it. The
balancer computes both from what the receiving ranks counted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from equipoise.cli.demo.traffic import Completion, Gap, Prompt

RECOVERED_MAX_OVER_MEAN = 1.2
"""A pool is back in balance when its busiest rank carries at most this many times the mean."""

DRIFTED_MAX_OVER_MEAN = 1.4
"""A pool is out of balance when its busiest rank carries at least this many times the mean."""

_SETTLING_S = 0.5  # around a rollout, time that is neither quiet nor rollout


class Window(NamedTuple):
    """A closed planning interval, as the balancer told it."""

    closed_s: float
    balancedness: float
    max_over_mean: float
    generation: int


class Span(NamedTuple):
    """A stretch of time."""

    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What the ranks told about one switch of layouts."""

    generation: int
    span: Span
    """From the first Stage to the last rank's word that it switched."""
    stall_ms: float
    median_step_ms: float
    moves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainShift:
    """One abrupt change of traffic and how the pool took it.

    `before` is the last window that closed before the shift. `after` is the worst of the first two
    that closed behind it (requests that ran on dilute the first). `intervals_to_recover` counts
    windows from the shift to the first at or below `RECOVERED_MAX_OVER_MEAN` behind the worst one,
    which included; None if there was none. `recovered` is the median from that window to the end of
    the domain's traffic (of what there was, if it did not recover).
    """

    from_domain: str
    to_domain: str
    at_s: float
    max_over_mean_before: float
    max_over_mean_after: float
    max_over_mean_recovered: float
    balancedness_before: float
    balancedness_after: float
    balancedness_recovered: float
    intervals_to_recover: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Inter-token latency, milliseconds; NaN without a sample."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run in figures; `faults` has a line for everything that must not happen."""

    shifts: tuple[DomainShift, ...]
    switches: tuple[Switch, ...]
    rollouts: int
    decisions: int
    generation: int
    requests: int
    failures: tuple[str, ...]
    tokens_compared: int
    tokens_identical: int
    steps_of_two_generations: int
    quiet: Latency
    during_rollout: Latency
    tokens_per_s: float
    peak_memory_bytes: int
    wall_s: float

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the run failed, a sentence each; empty when it went well."""
        faults = []
        if self.failures:
            faults.append(f"{len(self.failures)} requests failed, the first: {self.failures[0]}")
        if self.tokens_identical != self.tokens_compared:
            faults.append(
                f"{self.tokens_compared - self.tokens_identical} of {self.tokens_compared} tokens "
                f"differ from the same requests without a balancer"
            )
        if not self.tokens_compared:
            faults.append("no token was compared: the traffic was too short")
        if self.shifts and not self.rollouts:
            faults.append("no layout was rolled out, though the traffic shifted")
        if self.steps_of_two_generations:
            faults.append(f"{self.steps_of_two_generations} steps ran in two generations")
        faults += [
            f"balance did not recover from {shift.from_domain} to {shift.to_domain}: "
            f"rank max/mean stayed at {shift.max_over_mean_recovered:.2f}, "
            f"above {RECOVERED_MAX_OVER_MEAN}"
            for shift in self.shifts
            if shift.intervals_to_recover is None
        ]
        return tuple(faults)

    @property
    def p95_ratio(self) -> float:
        """p95 inter-token latency during rollouts over the same in quiet times."""
        return self.during_rollout.p95_ms / self.quiet.p95_ms

    def to_json(self) -> dict[str, Any]:
        """The run for `--json`; what is said of all shifts at once is their least favourable."""
        recoveries = [shift.intervals_to_recover for shift in self.shifts]
        document: dict[str, Any] = {
            "balancedness_before_shift": min(
                (shift.balancedness_before for shift in self.shifts), default=None
            ),
            # The smallest drift is the least to recover from.
            "balancedness_after_shift": max(
                (shift.balancedness_after for shift in self.shifts), default=None
            ),
            "balancedness_recovered": min(
                (shift.balancedness_recovered for shift in self.shifts), default=None
            ),
            "intervals_to_recover": max((n for n in recoveries if n is not None), default=None)
            if None not in recoveries
            else None,
            "rollouts": self.rollouts,
            "failed_requests": len(self.failures),
            "tokens_identical": self.tokens_identical,
            "tokens_compared": self.tokens_compared,
            "max_switch_stall_ms": max((s.stall_ms for s in self.switches), default=None),
            "median_step_ms": float(np.median([s.median_step_ms for s in self.switches]))
            if self.switches
            else None,
            "p95_inter_token_ratio_during_rollout": self.p95_ratio,
            "shifts": [asdict(shift) for shift in self.shifts],
            "switches": [asdict(switch) for switch in self.switches],
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
        return {key: _without_nan(value) for key, value in document.items()}


def shift_outcome(
    windows: Sequence[Window], *, from_domain: str, to_domain: str, at_s: float, until_s: float
) -> DomainShift:
    """How the pool took one shift, from windows in the order they closed."""
    before = [window for window in windows if window.closed_s <= at_s][-1:]
    behind = [window for window in windows if at_s < window.closed_s <= until_s]
    ratios = [window.max_over_mean for window in behind]
    worst = int(np.argmax(ratios[:2])) if ratios else 0
    recovered = next(
        (i for i in range(worst + 1, len(ratios)) if ratios[i] <= RECOVERED_MAX_OVER_MEAN), None
    )
    after = behind[worst : worst + 1]
    settled = behind[worst + 1 if recovered is None else recovered :]
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
    """How many tokens came and how many of them equal the reference at their place.

    A request that did not fail is compared to its reference's end: a token that never came, or one
    too many, differs.
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
    """Steps that ranks (which count steps alike) report with more than one generation."""
    generation_of_step: dict[int, int] = {}
    mixed: set[int] = set()
    for completion in completions:
        for arrival in completion.arrivals:
            seen = generation_of_step.setdefault(arrival.step, arrival.generation)
            if seen != arrival.generation:
                mixed.add(arrival.step)
    return len(mixed)


def split_latency(gaps: Sequence[Gap], rollouts: Sequence[Span]) -> tuple[Latency, Latency]:
    """Inter-token latency in quiet times and during rollouts, by whether a gap overlaps one.

    Gaps less than half a second away from a rollout count for neither.
    """
    from_s = np.array([gap.from_s for gap in gaps])
    to_s = np.array([gap.to_s for gap in gaps])
    during = np.zeros(len(gaps), dtype=bool)
    near = np.zeros(len(gaps), dtype=bool)
    for span in rollouts:
        during |= (from_s < span.to_s) & (to_s > span.from_s)
        near |= (from_s < span.to_s + _SETTLING_S) & (to_s > span.from_s - _SETTLING_S)
    return latency((to_s - from_s)[~near]), latency((to_s - from_s)[during])


def latency(lengths_s: np.ndarray[Any, np.dtype[np.float64]]) -> Latency:
    """Percentiles of gaps given in seconds."""
    if not lengths_s.size:
        return Latency(p50_ms=math.nan, p95_ms=math.nan, p99_ms=math.nan, samples=0)
    p50, p95, p99 = (float(value) for value in np.percentile(lengths_s * 1e3, (50, 95, 99)))
    return Latency(p50_ms=p50, p95_ms=p95, p99_ms=p99, samples=int(lengths_s.size))


def _median(values: Iterable[float]) -> float:
    """NaN without a value."""
    known = list(values)
    return float(np.median(known)) if known else math.nan


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN: null stands for what was not measured."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value

"""`judge_gain`: whether a rollout realised its expected gain, or must be rolled back.

A change of traffic right after a switch must not be blamed on the plan. So the previous layout is
evaluated on the same windows: a rollout is rolled back only if it misses its expected balancedness
and the previous layout would have done better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.costs import StepForecast
from equipoise.planning.layout import Layout
from equipoise.planning.load import assignments_per_layer
from equipoise.planning.policy import Policy
from equipoise.planning.step_cost import StepWindow
from equipoise.settings.numbers import format_number

_SAME_TRAFFIC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedGain:
    """The gain that a rollout's verdict predicted."""

    before: Layout
    """The previous layout, the target of a rollback."""
    generation: int
    """The new generation."""
    balancedness_before: float
    """Computed for the verdict's window under `before`."""
    balancedness_expected: float
    """Computed for the verdict's window under the new layout."""
    optimism: float
    """By how much the computed balancedness under `before` exceeded the measured one: replicas do
    not share load as evenly as computed."""
    step: StepForecast | None = None
    """Expected step time; None if the pool had not measured enough."""

    @property
    def gain(self) -> float:
        """Expected increase of balancedness."""
        return self.balancedness_expected - self.balancedness_before


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedWindow:
    """A window that ran entirely under the new layout."""

    load: Load
    """[layers, experts] in assignments."""
    balancedness: float
    """As measured by the receivers."""
    step: StepWindow | None = None
    """How long steps took; None if not reported."""


class GainOutcome(StrEnum):
    """Outcome of a rollout's expected gain."""

    KEPT = "kept"
    """Realised within the tolerance of the policy."""

    TRAFFIC_CHANGED = "traffic_changed"
    """Missed, but the previous layout would not have done better on this traffic."""

    ROLLED_BACK = "rolled_back"
    """Missed, and the pool rolls back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealisedGain:
    """The realised gain of a rollout."""

    outcome: GainOutcome
    reason: str
    balancedness: float
    """As measured, averaged over the windows."""
    gain: float
    """Difference from what the previous layout would have had on these windows."""
    step_s: float = 0.0
    """Duration of a step as measured, averaged over the windows; 0 if not reported."""

    @property
    def goes_back(self) -> bool:
        """Whether the pool returns to the previous layout."""
        return self.outcome is GainOutcome.ROLLED_BACK


def judge_gain(
    expected: ExpectedGain, windows: Sequence[ObservedWindow], *, policy: Policy
) -> RealisedGain | None:
    """Judge a rollout by the windows after it; None while too few had traffic."""
    busy = [one for one in windows if assignments_per_layer(one.load) >= policy.min_assignments]
    if len(busy) < policy.rollback_windows:
        return None
    busy = busy[: policy.rollback_windows]
    measured = fmean([one.balancedness for one in busy])
    old = fmean([balancedness(layout_loads(expected.before, one.load)) for one in busy])
    old = max(0.0, old - max(0.0, expected.optimism))
    missing, lost = expected.balancedness_expected - measured, old - measured
    tolerance = policy.rollback_tolerance
    facts = (
        f"generation {expected.generation} was expected to reach balancedness "
        f"{expected.balancedness_expected:.3f} and reached {measured:.3f} over "
        f"{len(busy)} windows, where generation {expected.before.generation} would "
        f"have reached {old:.3f}"
    )
    steps = [one.step for one in busy if one.step is not None]
    facts += _step_facts(expected.step, steps)
    if missing <= tolerance:
        outcome, reason = GainOutcome.KEPT, f"kept, as expected: {facts}"
    elif lost <= tolerance:
        outcome = GainOutcome.TRAFFIC_CHANGED
        reason = f"kept, because traffic changed: {facts}"
    else:
        outcome = GainOutcome.ROLLED_BACK
        reason = f"rolled back, because it is worse by more than {tolerance:.3f}: {facts}"
    return RealisedGain(
        outcome=outcome,
        reason=reason,
        balancedness=measured,
        gain=measured - old,
        step_s=fmean([one.step_s for one in steps]) if steps else 0.0,
    )


def _step_facts(expected: StepForecast | None, steps: Sequence[StepWindow]) -> str:
    """The expected step time beside the measured one, if there are both."""
    if expected is None or not steps:
        return ""
    measured_s = fmean([one.step_s for one in steps])
    traffic = fmean([one.mean_rank_load for one in steps]) / expected.mean_rank_load
    changed = "" if abs(traffic - 1) < _SAME_TRAFFIC else f" with {traffic:.2f} times the traffic"
    return (
        f"; a step of {format_number(1e3 * expected.current_s)} ms was expected to take "
        f"{format_number(1e3 * expected.proposed_s)} ms and took "
        f"{format_number(1e3 * measured_s)} ms{changed}"
    )


def too_soon_again(
    policy: Policy, *, rolled_back_s: float | None, shift_detected: bool, now: float
) -> str | None:
    """Return why no new plan is tried yet after a rollback; None if one may be.

    Plans depend on the load and the layout, so the next plan for the same ones would fail too.
    """
    cooldown_s = policy.rollback_cooldown_s
    if rolled_back_s is None or shift_detected or now - rolled_back_s >= cooldown_s:
        return None
    return (
        f"a plan for this load was rolled back {now - rolled_back_s:.1f} s ago: the next is tried "
        f"{cooldown_s:g} s after that, or when traffic shifts or ranks join or leave"
    )

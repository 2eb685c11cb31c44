"""`judge_gain`: whether a rollout brought what it promised, or the pool goes back.

Traffic that changed right after a switch must not be blamed on the plan. So the layout that ran
before is judged by the same windows: the pool goes back only if it fell short of the promise and
the old layout would have done better on what came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.layout import Layout
from equipoise.planning.load import assignments_per_layer
from equipoise.planning.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedGain:
    """What a rollout was to bring: from `before`, to which a way back leads, to `generation`.

    Both balancednesses are what the verdict's window makes of a layout. `optimism` is by how much
    such a computation exceeded what receivers measured under `before` on that window: replicas do
    not share as evenly as is computed, and the old layout would not have either.
    """

    before: Layout
    generation: int
    balancedness_before: float
    balancedness_promised: float
    optimism: float

    @property
    def gain(self) -> float:
        """Balancedness that was promised to be gained."""
        return self.balancedness_promised - self.balancedness_before


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedWindow:
    """A window that was wholly in the new layout.

    `load` is [layers, experts] in assignments, `balancedness` what receivers measured.
    """

    load: Load
    balancedness: float


class GainOutcome(StrEnum):
    """What became of a promise."""

    KEPT = "kept"
    """It brought what was promised, or so nearly that the policy takes it for that."""

    TRAFFIC_CHANGED = "traffic_changed"
    """It fell short, but the layout before would not have done better on what came."""

    ROLLED_BACK = "rolled_back"
    """It fell short, and the pool goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealisedGain:
    """The judgement, and why.

    `balancedness` is what was measured, mean over the windows; `gain` is by how much that is above
    what `before` would have had on them.
    """

    outcome: GainOutcome
    reason: str
    balancedness: float
    gain: float

    @property
    def goes_back(self) -> bool:
        """Whether the pool returns to the layout before."""
        return self.outcome is GainOutcome.ROLLED_BACK


def judge_gain(
    promise: ExpectedGain, witnesses: Sequence[ObservedWindow], *, policy: Policy
) -> RealisedGain | None:
    """Judge a rollout by the windows that followed it; None as long as too few had traffic."""
    heard = [one for one in witnesses if assignments_per_layer(one.load) >= policy.min_assignments]
    if len(heard) < policy.rollback_windows:
        return None
    heard = heard[: policy.rollback_windows]
    measured = _mean([one.balancedness for one in heard])
    old = _mean([balancedness(layout_loads(promise.before, one.load)) for one in heard])
    old = max(0.0, old - max(0.0, promise.optimism))
    missing, lost = promise.balancedness_promised - measured, old - measured
    tolerance = policy.rollback_tolerance
    facts = (
        f"generation {promise.generation} promised balancedness "
        f"{promise.balancedness_promised:.3f} and has {measured:.3f} over "
        f"{len(heard)} windows, on which generation {promise.before.generation} would "
        f"have had {old:.3f}"
    )
    if missing <= tolerance:
        outcome, reason = GainOutcome.KEPT, f"kept, as promised: {facts}"
    elif lost <= tolerance:
        outcome = GainOutcome.TRAFFIC_CHANGED
        reason = f"kept, because traffic changed and not the plan failed: {facts}"
    else:
        outcome = GainOutcome.ROLLED_BACK
        reason = f"rolled back, because it is worse by more than {tolerance:.3f}: {facts}"
    return RealisedGain(outcome=outcome, reason=reason, balancedness=measured, gain=measured - old)


def too_soon_again(
    policy: Policy, *, rolled_back_s: float | None, shift_detected: bool, now: float
) -> str | None:
    """Why nothing new is tried yet after a plan that was rolled back; None if it may be.

    Plans rest on the load, so for the same load the next one would fail alike. Other traffic is
    another matter.
    """
    cooldown_s = policy.rollback_cooldown_s
    if rolled_back_s is None or shift_detected or now - rolled_back_s >= cooldown_s:
        return None
    return (
        f"a plan for this load was rolled back {now - rolled_back_s:.1f} s ago, and the next is "
        f"tried after {cooldown_s:g} s or when traffic shifts"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""`judge`: whether a plan is worth its moves. Every verdict carries its reason in words."""

import math
from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.comparison import Comparison
from equipoise.planning.layout import Layout
from equipoise.planning.load import Shift, assignments_per_layer
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.topology import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Yes or no to a plan, and why.

    Both balancednesses are what the latest window's load makes of a layout. `moves` counts the
    slots that change their expert, over all layers, `reshared` those that keep it and serve another
    share of it; `bytes` is what the moves cost, and `pull_s` the seconds in which
    the rank with most of them pulls its own. `lost_s` estimates the seconds of serving that this
    and the switches take away, `payback_s` after how many seconds the gain has earned them back;
    infinite if there is no gain.
    """

    accepted: bool
    reason: str
    balancedness_current: float
    balancedness_proposed: float
    moves: int
    bytes: int
    pull_s: float
    lost_s: float
    payback_s: float
    reshared: int = 0


def judge(
    *,
    current: Layout,
    target: Layout,
    on_average: Comparison,
    on_window: Comparison,
    algorithm: Algorithm,
    window: Load,
    model: ModelShape,
    policy: Policy,
    now: float,
    last_switch_s: float | None,
    shift: Shift,
) -> Verdict:
    """Weigh what `target`, a plan's layout, gains on the latest window against what it costs.

    Both layouts are compared on the load that the plan was made for, `on_average`, and
    `on_window`: on the load of the latest window, which `window` has, [layers, experts].
    A plan follows the average; the window is the newer witness,
    so a plan that is worse on it is refused however good it looks on the average. What a plan saves
    is estimated as if the experts of the busiest rank were the whole of a step: the best case.
    """
    before, after = on_window.before, on_window.after
    cost = _cost(current, target, model=model, policy=policy, speedup=1.0 - before / after)
    refusal = (
        _paused(policy)
        or _too_few_assignments(window, policy)
        or _cooling_down(policy, shift, now=now, last_switch_s=last_switch_s)
        or _balanced_enough(before, policy)
        or _nothing_to_change(cost, before)
        or _gains_too_little(before, after, policy)
        or _never_pays(cost, policy)
    )
    shares = f" and other shares in {cost.reshared} slots" if cost.reshared else ""
    accepted = (
        f"{algorithm} plan raises balancedness on the latest window from {before:.3f} to "
        f"{after:.3f} (on the average from {on_average.before:.3f} to {on_average.after:.3f}) for "
        f"{cost.moves} moves of {cost.bytes / 2**20:.1f} MiB together{shares}, which cost "
        f"{cost.lost_s:.3g} s of serving and pay after {cost.payback_s:.3g} s; {shift.reason}"
    )
    return Verdict(
        accepted=refusal is None,
        reason=refusal or accepted,
        balancedness_current=before,
        balancedness_proposed=after,
        moves=cost.moves,
        bytes=cost.bytes,
        pull_s=cost.pull_s,
        lost_s=cost.lost_s,
        payback_s=cost.payback_s,
        reshared=cost.reshared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    moves: int
    reshared: int
    bytes: int
    pull_s: float
    lost_s: float
    payback_s: float


def _cost(
    current: Layout, target: Layout, *, model: ModelShape, policy: Policy, speedup: float
) -> _Cost:
    """What a plan costs; `speedup` is the part of a step's time that it saves.

    Ranks pull at the same time, so the one with most moves says how long. Its bytes also say how
    many generations they come in, because a generation stages a limited number; shares alone take
    one that stages nothing.
    """
    moved = target.expert_of_slot != current.expert_of_slot
    # Even shares follow from the experts' replicas: no word is needed for them.
    is_uneven = target.share_of_slot is not None or current.share_of_slot is not None
    reshared = int(((target.shares() != current.shares()) & ~moved).sum()) if is_uneven else 0
    moves_of_rank = np.add.reduceat(moved.sum(axis=0), current.first_slot[:-1])
    most_bytes = int(moves_of_rank.max()) * model.expert_bytes
    pull_s = most_bytes / policy.bandwidth_bytes_per_s
    num_switches = max(
        -(-most_bytes // policy.wave_bytes(model.expert_bytes)), 1 if reshared else 0
    )
    lost_s = pull_s * policy.pull_slowdown + num_switches * policy.switch_stall_s
    return _Cost(
        moves=int(moved.sum()),
        reshared=reshared,
        bytes=int(moved.sum()) * model.expert_bytes,
        pull_s=pull_s,
        lost_s=lost_s,
        payback_s=lost_s / speedup if speedup > 0 else math.inf,
    )


def _paused(policy: Policy) -> str | None:
    return "the policy says pause: nothing is moved" if policy.pause else None


def _too_few_assignments(window: Load, policy: Policy) -> str | None:
    assignments = assignments_per_layer(window)
    if assignments >= policy.min_assignments:
        return None
    return (
        f"the latest window has {assignments:.0f} assignments per layer, "
        f"a decision needs {policy.min_assignments:.0f}"
    )


def _cooling_down(
    policy: Policy, shift: Shift, *, now: float, last_switch_s: float | None
) -> str | None:
    if last_switch_s is None or shift.detected or now - last_switch_s >= policy.cooldown_s:
        return None
    return (
        f"the last switch was {now - last_switch_s:.1f} s ago, "
        f"the cooldown is {policy.cooldown_s:g} s"
    )


def _balanced_enough(before: float, policy: Policy) -> str | None:
    if policy.plan_below >= 1.0 or before < policy.plan_below:
        return None
    return (
        f"balanced enough: the latest window is at {before:.3f}, "
        f"nothing moves from {policy.plan_below:.3f} on"
    )


def _nothing_to_change(cost: _Cost, before: float) -> str | None:
    if cost.moves or cost.reshared:
        return None
    return f"nothing to move: no better layout was found than the current one, at {before:.3f}"


def _gains_too_little(before: float, after: float, policy: Policy) -> str | None:
    if after < before:
        return (
            f"the plan is worse on the latest window: balancedness would fall from {before:.3f} "
            f"to {after:.3f}"
        )
    if after - before < policy.min_gain:
        return (
            f"the plan gains too little on the latest window: balancedness would go from "
            f"{before:.3f} to {after:.3f}, the least gain is {policy.min_gain:.3f}"
        )
    return None


def _never_pays(cost: _Cost, policy: Policy) -> str | None:
    if cost.payback_s <= policy.payback_s:
        return None
    return (
        f"the plan costs more than it gains: {cost.moves} moves of {cost.bytes / 2**20:.1f} MiB "
        f"together cost {cost.lost_s:.3g} s of serving ({cost.pull_s:.3g} s of pulling) and pay "
        f"after {cost.payback_s:.3g} s, the limit is {policy.payback_s:g} s"
    )

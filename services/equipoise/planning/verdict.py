"""`judge`: whether a plan is worth its moves. Every verdict states its reason."""

import math
from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import Comparison
from equipoise.planning.costs import MeasuredCosts, StepForecast
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.load import Shift, assignments_per_layer
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.topology import ModelShape
from equipoise.settings.numbers import format_bytes, format_number

MARGIN = 2.0
"""Multiple of a plan's payback time that layouts must last: traffic may change before they did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan is accepted, and why."""

    accepted: bool
    reason: str
    balancedness_current: float
    """Of the latest window's load under the current layout."""
    balancedness_proposed: float
    """Of the latest window's load under the plan."""
    moves: int
    """Slots that change their expert, over all layers."""
    bytes: int
    """Bytes of the moves."""
    wave_bytes: int
    """Bytes that a rank stages per wave, at most."""
    pull_s: float
    """Seconds that the rank with the most moves spends fetching."""
    lost_s: float
    """Seconds of serving lost to fetching and switches, by the latest waves or by the policy."""
    payback_s: float
    """Seconds until the gain has recovered `lost_s`; infinite without a gain."""
    step: StepForecast | None
    """Predicted change of the step time; None if the pool has not measured enough."""
    throughput_gain: float
    """Fraction by which throughput grows: by `step`, otherwise an upper bound, as if a step
    consisted only of expert computation."""
    reshared: int = 0
    """Slots that keep their expert but serve another share."""


def judge(
    *,
    current: Layout,
    target: Layout,
    on_average: Comparison,
    on_window: Comparison,
    on_expected: Comparison,
    lasts_s: float,
    algorithm: Algorithm,
    returned_layers: int = 0,
    evened_layers: int = 0,
    window: Load,
    model: ModelShape,
    policy: Policy,
    now: float,
    last_switch_s: float | None,
    shift: Shift,
    costs: MeasuredCosts,
) -> Verdict:
    """Weigh what a plan gains while layouts last against its cost.

    The gain is that on the traffic to expect. The latest window stands for the present kind of
    traffic: it is more recent than the average that the plan was made for. The saving is what the
    pool's measured step times predict. Without enough of them it is an upper bound, as if a step
    consisted only of the expert computation of the busiest rank, and the reason says so.

    Args:
        current: the layout in use.
        target: the layout of the plan.
        on_average: both layouts compared on the load that the plan was made for.
        on_window: both layouts compared on the latest window.
        on_expected: both layouts compared on the traffic to expect while layouts last.
        lasts_s: how long layouts last, seconds.
        algorithm: the algorithm that made the plan.
        returned_layers: layers whose expert groups the plan returns to their nodes. The policy asks
            for that, so the plan need not gain anything.
        evened_layers: layers in which ranks get equally many slots again; likewise.
        window: the load of the latest window, [layers, experts].
        model: the shape of the model.
        policy: thresholds, and costs that are not measured.
        now: the current time in seconds.
        last_switch_s: the time of the last switch; None if there was none.
        shift: whether traffic shifted.
        costs: what the pool has measured.
    """
    before, after = on_window.before, on_window.after
    cost = _cost(current, target, on_window, on_expected, model=model, policy=policy, costs=costs)
    required = _required(returned_layers, evened_layers)
    rejection = (
        ("the policy pauses rebalancing" if policy.pause else None)
        or _too_few_assignments(window, policy)
        or _cooling_down(policy, shift, now=now, last_switch_s=last_switch_s)
        or (
            None
            if required
            else _balanced_enough(before, policy)
            or _nothing_to_change(cost)
            or _gains_too_little(on_expected, policy)
            or _gains_too_little_throughput(on_expected, policy, costs)
            or _never_pays(cost, lasts_s)
        )
    )
    if rejection is not None:
        return replace(cost, reason=rejection)
    if required:
        return replace(
            cost,
            accepted=True,
            reason=f"{algorithm} plan {required}, as the policy asks: balancedness on the latest "
            f"window goes from {before:.3f} to {after:.3f}; it takes {cost.moves} moves of "
            f"{format_bytes(cost.bytes)} in total, which cost {format_number(cost.lost_s)} s of "
            "serving",
        )
    expected = ""
    if on_expected is not on_window:
        expected = (
            f", on the traffic to expect from {on_expected.before:.3f} to {on_expected.after:.3f}"
        )
    shares = f" and other shares in {cost.reshared} slots" if cost.reshared else ""
    return replace(
        cost,
        accepted=True,
        reason=f"{algorithm} plan {'raises' if after >= before else 'lowers'} balancedness on the "
        f"latest window from {before:.3f} to {after:.3f} (on the average load from "
        f"{on_average.before:.3f} to {on_average.after:.3f}{expected}): "
        f"{_gain_text(on_window, costs)}; it takes {cost.moves} "
        f"moves of {format_bytes(cost.bytes)} in total{shares}, which cost "
        f"{format_number(cost.lost_s)} s of serving and pay back after "
        f"{format_number(cost.payback_s)} s, where layouts last {format_number(lasts_s)} s "
        f"({costs.move_cost(policy).reason}); {shift.reason}",
    )


def _required(returned_layers: int, evened_layers: int) -> str:
    """Say what the policy asks for whatever it costs; empty if that is nothing."""
    words = []
    if returned_layers:
        words.append(f"returns the expert groups of {returned_layers} layers to their nodes")
    if evened_layers:
        words.append(f"gives each rank equally many slots again in {evened_layers} layers")
    return " and ".join(words)


def _throughput_gain(on_load: Comparison, costs: MeasuredCosts) -> float:
    step = costs.forecast(on_load)
    return on_load.after / on_load.before - 1 if step is None else step.throughput_gain


def _gain_text(on_load: Comparison, costs: MeasuredCosts) -> str:
    step = costs.forecast(on_load)
    if step is not None:
        return step.text
    gain = _throughput_gain(on_load, costs)
    return f"it raises throughput by at most {gain:.1%} ({costs.unknown})"


def _cost(
    current: Layout,
    target: Layout,
    on_window: Comparison,
    on_expected: Comparison,
    *,
    model: ModelShape,
    policy: Policy,
    costs: MeasuredCosts,
) -> Verdict:
    """Estimate the cost of a plan, as a verdict not yet accepted.

    Ranks fetch in parallel, so the rank with the most moves sets the duration. Its bytes also set
    the number of generations, because each stages a limited number of bytes. New shares alone need
    one generation that stages nothing.
    """
    moved = is_moved(current.expert_of_slot, target.expert_of_slot)
    # Even shares follow from the replicas and are not sent.
    is_uneven = target.share_of_slot is not None or current.share_of_slot is not None
    reshared = int(((target.shares() != current.shares()) & ~moved).sum()) if is_uneven else 0
    moves_of_rank = np.add.reduceat(moved.sum(axis=0), current.first_slot[:-1])
    most_bytes = int(moves_of_rank.max()) * model.expert_bytes
    pull_s = most_bytes / costs.move_cost(policy).bandwidth_bytes_per_s
    time_saved = 1 - 1 / (1 + _throughput_gain(on_expected, costs))
    wave_bytes = costs.wave_bytes(
        most_bytes, time_saved=time_saved, expert_bytes=model.expert_bytes, policy=policy
    )
    lost_s = costs.lost_s(
        most_bytes, wave_bytes=wave_bytes, is_reshared=reshared > 0, policy=policy
    )
    return Verdict(
        accepted=False,
        reason="",
        balancedness_current=on_window.before,
        balancedness_proposed=on_window.after,
        moves=int(moved.sum()),
        bytes=int(moved.sum()) * model.expert_bytes,
        wave_bytes=wave_bytes,
        pull_s=pull_s,
        lost_s=lost_s,
        payback_s=lost_s / time_saved if time_saved > 0 else math.inf,
        step=costs.forecast(on_window),
        throughput_gain=_throughput_gain(on_window, costs),
        reshared=reshared,
    )


def _too_few_assignments(window: Load, policy: Policy) -> str | None:
    assignments = assignments_per_layer(window)
    if assignments >= policy.min_assignments:
        return None
    return (
        f"the latest window has {assignments:.0f} assignments per layer, "
        f"but a decision needs {policy.min_assignments:.0f}"
    )


def _cooling_down(
    policy: Policy, shift: Shift, *, now: float, last_switch_s: float | None
) -> str | None:
    if last_switch_s is None or shift.detected or now - last_switch_s >= policy.cooldown_s:
        return None
    return (
        f"the last switch was {now - last_switch_s:.1f} s ago, "
        f"and the cooldown is {policy.cooldown_s:g} s"
    )


def _balanced_enough(before: float, policy: Policy) -> str | None:
    if policy.plan_below >= 1.0 or before < policy.plan_below:
        return None
    return (
        f"balanced enough: the latest window is at {before:.3f}, "
        f"and plans are made below {policy.plan_below:.3f}"
    )


def _nothing_to_change(cost: Verdict) -> str | None:
    if cost.moves or cost.reshared:
        return None
    return (
        f"nothing to move: found no better layout than the current one, at "
        f"{cost.balancedness_current:.3f}"
    )


def _gains_too_little(on_expected: Comparison, policy: Policy) -> str | None:
    before, after = on_expected.before, on_expected.after
    if after < before:
        return (
            f"the plan is worse on the traffic to expect: balancedness would fall from "
            f"{before:.3f} to {after:.3f}"
        )
    if after - before < policy.min_gain:
        return (
            f"the plan gains too little on the traffic to expect: balancedness would go from "
            f"{before:.3f} to {after:.3f}, but the minimum gain is {policy.min_gain:.3f}"
        )
    return None


def _gains_too_little_throughput(
    on_expected: Comparison, policy: Policy, costs: MeasuredCosts
) -> str | None:
    if _throughput_gain(on_expected, costs) >= policy.min_throughput_gain:
        return None
    return (
        f"the plan gains too little on the traffic to expect: {_gain_text(on_expected, costs)}, "
        f"but the minimum gain is {policy.min_throughput_gain:.1%}"
    )


def _never_pays(cost: Verdict, lasts_s: float) -> str | None:
    if MARGIN * cost.payback_s <= lasts_s:
        return None
    return (
        f"the plan costs more than it gains: {cost.moves} moves of {format_bytes(cost.bytes)} "
        f"in total cost {format_number(cost.lost_s)} s of serving "
        f"({format_number(cost.pull_s)} s of fetching) and pay back after "
        f"{format_number(cost.payback_s)} s; the limit is half of the {format_number(lasts_s)} s "
        "that layouts last"
    )

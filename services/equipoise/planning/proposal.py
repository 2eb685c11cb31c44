"""`propose`: a plan and its verdict, the expensive part of a decision; and `propose_layout`."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import (
    Comparison,
    balancedness,
    compare,
    layout_loads,
    mean_over_kinds,
)
from equipoise.planning.change import LayoutChange
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.layout import Layout, count_moves
from equipoise.planning.load import Shift
from equipoise.planning.moves import waves
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.planner import Plan
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.redundancy import Redundancy
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.traffic import ExpectedTraffic, Traffic
from equipoise.planning.verdict import Verdict, judge

BENEFIT_OF_DOUBT = 4.0
"""Multiple of its samples that an average counts as. Chance is then taken as half of what it may
explain at most, because the verdict also tries the plan on the latest window. On recorded loads at
10,000 to 100,000 assignments per window, that loses least of moves and balance together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProposalRequest:
    """Everything that a proposal depends on."""

    current: Layout
    average: Load
    """[layers, experts] in assignments per second: the load to plan for."""
    samples: float | None = None
    """Assignments per layer that the average is as precise as, so that little moves for chance;
    None to plan as if it were exact."""
    window: Load
    """[layers, experts] in assignments: the load to judge the plan on."""
    traffic: Traffic = field(default_factory=Traffic)
    """The kinds of traffic that the pool has learned."""
    shift: Shift
    model: ModelShape
    topology: Topology
    policy: Policy
    policy_hash: str = ""
    """Identifies the policy in the decision record."""
    first_generation: int
    """Generation of the first wave of an accepted plan."""
    now: float
    """Seconds."""
    last_switch_s: float | None
    """Seconds; None before the first switch."""
    balancedness: float | None = None
    """As measured by the receivers in the window; None if unknown."""
    costs: MeasuredCosts = field(default_factory=MeasuredCosts)
    """What the pool has measured about its steps and moves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A plan, its verdict, and the waves of an accepted plan."""

    request: ProposalRequest
    plan: Plan
    verdict: Verdict
    waves: Sequence[LayoutChange]
    """Empty if the plan was rejected. Changes instead of layouts, because hundreds of pools may
    have dozens of waves pending."""
    redundancy: Redundancy | None = None
    """A number of redundant slots that would suit the average load better, if it was looked for."""


def propose(request: ProposalRequest) -> Proposal:
    """Plan for the average load and judge the plan on the latest window."""
    policy, samples = request.policy, request.samples
    if samples is not None:
        # A policy that decides on any number of assignments ignores chance: so do forced plans.
        samples = BENEFIT_OF_DOUBT * samples if policy.min_assignments else None
    is_incremental = policy.algorithm is Algorithm.INCREMENTAL
    has_locality = is_incremental or policy.algorithm is Algorithm.LOCAL
    lasts_s = request.traffic.layouts_last_s(policy.payback_s)
    load = average = request.average
    weights, expected = None, None
    if is_incremental and request.traffic.kinds and not policy.risk_z:
        expected = request.traffic.expected(
            most_s=policy.payback_s,
            most_kinds=min(MAX_KINDS, max(1, MAX_KINDS_RANKS // request.topology.num_ranks)),
            least_weight=_least_weight(request.topology),
            window_s=policy.interval_s,
        )
        load, weights = expected.shares, expected.weights
        average = mean_over_kinds(load, weights)
        if samples is not None:
            samples = BENEFIT_OF_DOUBT * expected.samples
    wishes = Wishes(
        algorithm=policy.algorithm,
        slots=policy.slots,
        locality=policy.locality if has_locality else None,
        weighted=policy.weighted,
        samples=samples,
        weights=weights,
        least_gain_per_move=_price_of_move(request, lasts_s) if is_incremental else 0.0,
    )
    planned = plan_in_places(
        load,
        wishes,
        model=request.model,
        topology=request.topology,
        current=request.current,
    )
    current = request.current
    target = current.with_placement(
        planned.expert_of_slot,
        generation=request.first_generation,
        share_of_slot=planned.share_of_slot,
    )
    on_average, on_window = compare(current, target, average, request.window)
    on_expected = on_window
    if expected is not None:
        on_expected = _mixed(current, target, on_window, expected, request.window)
    verdict = judge(
        current=current,
        target=target,
        on_average=on_average,
        on_window=on_window,
        on_expected=on_expected,
        lasts_s=lasts_s,
        algorithm=planned.algorithm,
        returned_layers=planned.returned_layers,
        evened_layers=planned.evened_layers,
        window=request.window,
        model=request.model,
        policy=replace(policy, min_gain=_least_gain(request)),
        now=request.now,
        last_switch_s=request.last_switch_s,
        shift=request.shift,
        costs=request.costs,
    )
    way: Sequence[LayoutChange] = ()
    if verdict.accepted:
        way = waves(
            current,
            target,
            expert_bytes=request.model.expert_bytes,
            max_wave_bytes=verdict.wave_bytes,
            # The layers that gain most on the latest window go first.
            gain_of_layer=on_expected.gain_of_layer,
        )
    return Proposal(request=request, plan=planned, verdict=verdict, waves=way)


UNEVENNESS = 1.5
"""Moves of the rank with the most, which sets the cost, relative to the mean over ranks."""


MAX_KINDS = 4
"""Kinds of traffic that a plan is made for."""

MAX_KINDS_RANKS = 1024
"""Ranks times kinds of a plan: each kind adds to its time."""

LEAST_WEIGHT = 0.01
"""Expected fraction of time below which a kind is left out of a plan."""

SLOTS_FOR_KINDS = 3
"""Slots of a rank from which one layout serves several kinds well."""

LEAST_WEIGHT_OF_FEW_SLOTS = 0.25
"""`LEAST_WEIGHT` where ranks have fewer: only kinds that take turns quickly are worth it there."""

WINDOWS_TO_SETTLE = 3
"""Windows without a new kind of traffic after which layouts are not refined for every little gain:
what the planner learns from then on about traffic that it knows is mostly noise."""

SETTLED = 2.0
"""Multiple of the minimum gain that plans for such traffic need."""


def _least_weight(topology: Topology) -> float:
    """Expected fraction of time below which a kind is left out of a plan."""
    has_room = min(topology.slots_of_rank) >= SLOTS_FOR_KINDS
    return LEAST_WEIGHT if has_room else LEAST_WEIGHT_OF_FEW_SLOTS


def _least_gain(request: ProposalRequest) -> float:
    """Balancedness that a plan must gain: more for settled traffic than for new traffic."""
    is_settled = request.traffic.num_familiar >= WINDOWS_TO_SETTLE
    return min(1.0, request.policy.min_gain * (SETTLED if is_settled else 1.0))


def _price_of_move(request: ProposalRequest, lasts_s: float) -> float:
    """Balancedness that a move must gain to pay for itself while layouts last."""
    policy, model = request.policy, request.model
    cost = request.costs.move_cost(policy)
    of_bytes = policy.pull_slowdown / cost.bandwidth_bytes_per_s
    of_bytes += cost.switch_stall_s / policy.wave_bytes(model.expert_bytes)
    lost_s = UNEVENNESS * of_bytes * model.expert_bytes / request.topology.num_ranks
    return lost_s / max(lasts_s, 1e-3)


def _mixed(
    current: Layout,
    target: Layout,
    on_window: Comparison,
    expected: ExpectedTraffic,
    window: Load,
) -> Comparison:
    """Compare two layouts on the expected traffic; the latest window stands for its kind."""
    total = window.sum(axis=1, keepdims=True)
    others = compare(current, target, *(shares * total for shares in expected.shares[1:]))
    parts = list(zip(expected.weights.tolist(), (on_window, *others), strict=True))
    return Comparison(
        before=sum(part * one.before for part, one in parts),
        after=sum(part * one.after for part, one in parts),
        gain_of_layer=np.sum([part * one.gain_of_layer for part, one in parts], axis=0),
        busiest_before=sum(part * one.busiest_before for part, one in parts),
        busiest_after=sum(part * one.busiest_after for part, one in parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutProposal:
    """The waves to a layout that no planner chose, for example an earlier one, and their cost."""

    waves: Sequence[LayoutChange]
    """Changes from valid layout to valid layout, one generation each; empty if nothing changes."""
    moves: int
    """Slots that change their expert."""
    bytes: int
    """Bytes to copy."""
    balancedness_current: float
    """Of the latest window's load under the current layout; 0 without load."""
    balancedness_proposed: float
    """The same under the target layout."""


def propose_layout(
    current: Layout,
    target: Layout,
    *,
    window: Load | None,
    model: ModelShape,
    policy: Policy,
    first_generation: int,
) -> LayoutProposal:
    """Lead from `current` to the placement of `target`, in generations from `first_generation` on.

    The generation of `target` is ignored, because generations are never reused. `window` is the
    latest load, [layers, experts] in assignments, or None; it is only reported, because the caller
    has decided already.
    """
    assert fits(target, current), "layouts of one pool"
    moves = count_moves(current.expert_of_slot, target.expert_of_slot)
    return LayoutProposal(
        waves=waves(
            current,
            current.with_placement(
                target.expert_of_slot,
                generation=first_generation,
                share_of_slot=target.share_of_slot,
            ),
            expert_bytes=model.expert_bytes,
            max_wave_bytes=policy.wave_bytes(model.expert_bytes),
        ),
        moves=moves,
        bytes=moves * model.expert_bytes,
        balancedness_current=_balancedness(current, window),
        balancedness_proposed=_balancedness(target, window),
    )


def fits(layout: Layout, other: Layout) -> bool:
    """Whether both are layouts of the same model on ranks of the same sizes."""
    return (
        layout.num_layers == other.num_layers
        and layout.num_experts == other.num_experts
        and layout.slots_of_rank == other.slots_of_rank
    )


def has_places(layout: Layout, *, places_of_rank: Sequence[int]) -> bool:
    """Whether ranks with so many places, none for one in each slot, can hold a layout of theirs."""
    if not places_of_rank:
        return not layout.has_empty_slots
    return all(map(operator.le, layout.used_places, places_of_rank))


def _balancedness(layout: Layout, window: Load | None) -> float:
    shape = (layout.num_layers, layout.num_experts)
    if window is None or window.shape != shape or not window.any():
        return 0.0
    return balancedness(layout_loads(layout, window))

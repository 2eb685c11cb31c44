"""`propose`: a plan and its verdict, the expensive part of a decision; and `propose_layout`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import Comparison, balancedness, compare, layout_loads
from equipoise.planning.change import LayoutChange
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.layout import Layout
from equipoise.planning.load import Shift
from equipoise.planning.moves import waves
from equipoise.planning.planner import Plan, plan
from equipoise.planning.policy import Algorithm, Policy
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


def propose(request: ProposalRequest) -> Proposal:
    """Plan for the average load and judge the plan on the latest window."""
    policy, samples = request.policy, request.samples
    if samples is not None:
        # A policy that decides on any number of assignments ignores chance: so do forced plans.
        samples = BENEFIT_OF_DOUBT * samples if policy.min_assignments else None
    is_local = policy.algorithm is Algorithm.LOCAL
    is_incremental = policy.algorithm is Algorithm.INCREMENTAL
    lasts_s = request.traffic.layouts_last_s(policy.payback_s)
    expected = None
    average = request.average
    if is_incremental and request.traffic.kinds and not policy.risk_z:
        expected = request.traffic.expected(lasts_s)
    plans_for_kinds = expected is not None and hedges(request.topology)
    if expected is not None and plans_for_kinds:
        average = expected.mean()
        if samples is not None:
            samples = BENEFIT_OF_DOUBT * expected.samples
    price = _price_of_move(request, lasts_s)
    planned = plan(
        average,
        model=request.model,
        topology=request.topology,
        current=request.current,
        algorithm=policy.algorithm,
        locality=policy.locality if is_local else None,
        weighted=policy.weighted,
        samples=samples,
        least_gain_per_move=price if is_incremental else 0.0,
        expected=expected if plans_for_kinds else None,
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
        window=request.window,
        model=request.model,
        policy=policy,
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
            max_wave_bytes=policy.wave_bytes(request.model.expert_bytes),
            # The layers that gain most on the latest window go first.
            gain_of_layer=on_expected.gain_of_layer,
        )
    return Proposal(request=request, plan=planned, verdict=verdict, waves=way)


MOST_HEDGED_RANKS = 192
"""Ranks up to which plans are made for several kinds of traffic at once: beyond, plans would take
minutes."""

LEAST_HEDGED_SLOTS = 3
"""Slots of a rank from which they are: with fewer, a layout for several kinds serves none well."""

UNEVENNESS = 1.5
"""Moves of the rank with the most, which sets the cost, relative to the mean over ranks."""


def hedges(topology: Topology) -> bool:
    """Whether a pool's plans are for all kinds of traffic; others are for the average load only."""
    slots = min(topology.slots_of_rank)
    return topology.num_ranks <= MOST_HEDGED_RANKS and slots >= LEAST_HEDGED_SLOTS


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
    """Of the latest window's load under the current layout; 1.0 without load."""
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
    moves = int(np.count_nonzero(current.expert_of_slot != target.expert_of_slot))
    return LayoutProposal(
        waves=waves(
            current,
            current.with_placement(
                target.expert_of_slot,
                generation=first_generation,
                share_of_slot=target.share_of_slot,
            ),
            expert_bytes=model.expert_bytes,
            max_wave_bytes=policy.max_wave_bytes,
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


def _balancedness(layout: Layout, window: Load | None) -> float:
    if window is None or window.shape != (layout.num_layers, layout.num_experts):
        return 1.0
    return balancedness(layout_loads(layout, window))

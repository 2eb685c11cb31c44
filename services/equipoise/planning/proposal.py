"""`propose`: a plan and its verdict, the expensive part of a decision; and `propose_layout`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, compare, layout_loads
from equipoise.planning.change import LayoutChange
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.layout import Layout, count_moves
from equipoise.planning.load import Shift
from equipoise.planning.moves import waves
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.planner import Plan
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.topology import ModelShape, Topology
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
    is_incremental = policy.algorithm is Algorithm.INCREMENTAL
    has_locality = is_incremental or policy.algorithm is Algorithm.LOCAL
    wishes = Wishes(
        algorithm=policy.algorithm,
        slots=policy.slots,
        locality=policy.locality if has_locality else None,
        target_balancedness=policy.target_balancedness if is_incremental else None,
        weighted=policy.weighted,
        samples=samples,
    )
    planned = plan_in_places(
        request.average,
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
    on_average, on_window = compare(current, target, request.average, request.window)
    verdict = judge(
        current=current,
        target=target,
        on_average=on_average,
        on_window=on_window,
        algorithm=planned.algorithm,
        returned_layers=planned.returned_layers,
        evened_layers=planned.evened_layers,
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
            gain_of_layer=on_window.gain_of_layer,
        )
    return Proposal(request=request, plan=planned, verdict=verdict, waves=way)


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


def has_places(layout: Layout, *, num_places: int) -> bool:
    """Whether ranks with that many places each, 0 for one in each slot, can hold a layout."""
    if not num_places:
        return not layout.has_empty_slots
    return max(layout.used_places) <= num_places


def _balancedness(layout: Layout, window: Load | None) -> float:
    shape = (layout.num_layers, layout.num_experts)
    if window is None or window.shape != shape or not window.any():
        return 0.0
    return balancedness(layout_loads(layout, window))

"""`plan`: the layout that a load asks for, as close as possible to the one in use."""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Load, ShareTable
from equipoise.planning.balance import balancedness, balancedness_per_layer, mean_if_busy
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.placing.bound import upper_bounds
from equipoise.planning.placing.chance import gains_beyond_chance
from equipoise.planning.placing.from_scratch import place_globally, place_hierarchically
from equipoise.planning.placing.incremental import MoveStep, improve
from equipoise.planning.placing.locality import place_locally
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.weigh import Placed, mixed, weigh
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.planning.shares import even_shares
from equipoise.planning.topology import ModelShape, Topology

LEAST_LAYER_GAIN = 0.002
"""Balancedness that a layer must gain for its experts to move: below this, averages only jitter."""

LOCALITY = 0.25
"""Where `local` stands if nobody turns the dial: on recorded loads of a 256-expert model on 4
nodes enough for 0.97 or more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A valid placement, what it reaches on the load it is for, and what it costs.

    `expert_of_slot` is int32 [layers, slots] over the slots of `ranks`, the ranks planned for, in
    ascending order. `share_of_slot`, of the same shape, are their shares, None if all are even.
    `algorithm` is the one that made it, never `auto`. `balancedness` is the mean over the layers
    with traffic of `balancedness_of_layer`, [layers]; `bound` is a balancedness that no placement
    exceeds. `moves` counts slots that change their expert. `off_node_share`
    is the share of the load that is served off the node that serves most of its expert group; 0
    where there are fewer groups than nodes, so that nothing has a home.

    An incremental plan also has its `steps`, most gain per move first, of which any prefix is a
    valid layout and worth having; and the `curve` of what any number of moves buys at best, if
    experts are split evenly: (moves, balancedness). With shares there are no steps: these fit the
    whole plan only.
    """

    expert_of_slot: ExpertTable
    ranks: tuple[int, ...]
    algorithm: Algorithm
    balancedness: float
    balancedness_of_layer: Load
    bound: float
    moves: int
    off_node_share: float
    reason: str
    share_of_slot: ShareTable | None = None
    steps: tuple[MoveStep, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()


def plan(
    load: Load,
    *,
    model: ModelShape,
    topology: Topology,
    current: Layout | None = None,
    algorithm: Algorithm = Algorithm.AUTO,
    locality: float | None = None,
    max_moves: int | None = None,
    target_balancedness: float | None = None,
    exclude_ranks: frozenset[int] = frozenset(),
    samples: float | None = None,
    weighted: Weighting = Weighting.OFF,
) -> Plan:
    """Place experts so that ranks carry even parts of `load`, [layers, experts] in any unit.

    A layer keeps its current placement (the contiguous one, if there is none) unless it gains
    something, so a layer without load never moves and no plan is worse than what is there.
    `auto` makes both plans and keeps the more balanced; hierarchical wins ties. With a `locality`,
    a dial from 0 (hierarchical) to 1 (global; see `place_locally`), it is `local`, and with a
    target for the balancedness or a limit of moves `incremental`: the ones that know these.

    Ranks in `exclude_ranks` get nothing: experts that only they held go to the others. `samples`
    is how many expert assignments per layer the load rests on; with it, layers whose gain chance
    explains keep their placement.

    `weighted` says whether an expert's slots may serve unequal shares. If so, layers are first
    relieved by new shares where their experts lie, which moves nothing, and plans that may put any
    expert anywhere also try placements made for uneven shares (`place_weighted`). No layer is less
    balanced than with even splits.

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    ranks = tuple(rank for rank in range(topology.num_ranks) if rank not in exclude_ranks)
    if not ranks:
        raise InvalidLayoutError("no rank is left to plan for: exclude fewer")
    problem = Problem.of(
        load, model=model, topology=topology, current=current, ranks=ranks, weighted=weighted
    )
    is_limited = max_moves is not None or target_balancedness is not None
    if algorithm is Algorithm.AUTO and (is_limited or locality is not None):
        algorithm = Algorithm.INCREMENTAL if is_limited else Algorithm.LOCAL
    assert algorithm is Algorithm.INCREMENTAL or not is_limited, "only incremental has limits"
    assert algorithm is Algorithm.LOCAL or locality is None, "only local has a dial"
    if algorithm is Algorithm.INCREMENTAL:
        made = _plan_incrementally(
            problem, max_moves=max_moves, target=target_balancedness, samples=samples
        )
    elif algorithm is Algorithm.GLOBAL:
        made = _plan_globally(problem, samples=samples)
    elif (obstacle := problem.obstacle_to_hierarchy()) is not None:
        made = _plan_globally(problem, samples=samples)
        made = replace(made, reason=f"{made.reason}; not hierarchical: {obstacle}")
    elif algorithm is Algorithm.HIERARCHICAL:
        made = _plan_hierarchically(problem, samples=samples)
    elif algorithm is Algorithm.LOCAL:
        dial = LOCALITY if locality is None else locality
        made = _plan_locally(problem, locality=dial, samples=samples)
    else:
        made = _plan_both_ways(problem, samples=samples)
    return replace(made, ranks=ranks)


def _plan_both_ways(problem: Problem, *, samples: float | None) -> Plan:
    hierarchical = _plan_hierarchically(problem, samples=samples)
    other = _plan_globally(problem, samples=samples)
    winner, loser = (
        (hierarchical, other)
        if hierarchical.balancedness >= other.balancedness
        else (other, hierarchical)
    )
    return replace(winner, reason=f"{winner.reason}; {loser.algorithm}: {loser.balancedness:.3f}")


def _plan_hierarchically(problem: Problem, *, samples: float | None) -> Plan:
    table = place_hierarchically(problem)
    return _adopted(problem, table, Algorithm.HIERARCHICAL, samples=samples)


def _plan_locally(problem: Problem, *, locality: float, samples: float | None) -> Plan:
    table = place_locally(problem, locality=locality)
    made = _adopted(problem, table, Algorithm.LOCAL, samples=samples)
    at_home = 1.0 - made.off_node_share
    return replace(made, reason=f"{made.reason}; {at_home:.1%} of the load stays on its home node")


def _plan_globally(problem: Problem, *, samples: float | None) -> Plan:
    return _adopted(problem, place_globally(problem), Algorithm.GLOBAL, samples=samples)


def _plan_incrementally(
    problem: Problem, *, max_moves: int | None, target: float | None, samples: float | None
) -> Plan:
    held = Placed(problem.held, problem.held_shares)
    before = balancedness(problem.rank_loads(*held))
    if target is not None and before >= target and problem.is_covered.all():
        made = _summary(problem, held, Algorithm.INCREMENTAL)
        return replace(
            made, reason=f"nothing to move: {before:.3f} is at the target of {target:.3f} already"
        )
    kept = _kept(problem, samples=samples)
    standing = problem.balancedness_of_layer(*kept)
    if target is not None and problem.is_covered.all():
        made = _summary(problem, kept, Algorithm.INCREMENTAL)
        if made.balancedness >= target:
            words = f"incremental: {made.balancedness:.3f} after {before:.3f} by other shares alone"
            return replace(made, reason=words)
    fresh = place_globally(problem)
    anew = weigh(problem, fresh, may_chain=True)
    layers, comparison = _worth_changing(problem, kept, anew, samples=samples)
    better = improve(
        problem,
        layers=layers,
        fresh=fresh,
        standing=standing,
        least_gain=LEAST_LAYER_GAIN,
        target=target,
        max_moves=max_moves,
    )
    moved = (better.table != problem.held).any(axis=1)
    placed = mixed(problem, moved, kept, weigh(problem, better.table, may_chain=False))
    if problem.weighted is not Weighting.OFF and max_moves is None:
        placed = _anew_where_needed(problem, placed, anew, layers=layers, target=target)
    made = _summary(problem, placed, Algorithm.INCREMENTAL)
    reason = f"incremental: {made.balancedness:.3f} after {before:.3f} by {made.moves} moves"
    if target is not None and made.balancedness < target:
        reason += f"; the target of {target:.3f} is out of reach"
    return replace(
        made,
        steps=better.steps if placed.shares is None else (),
        curve=better.curve,
        reason=reason + _share_words(problem, placed) + comparison,
    )


def _anew_where_needed(
    problem: Problem,
    placed: Placed,
    anew: Placed,
    *,
    layers: Bools,
    target: float | None,
) -> Placed:
    """Placements from scratch in the layers that gain most by them, until the target is reached."""
    reached, possible = (problem.balancedness_of_layer(*one) for one in (placed, anew))
    gain = np.where(layers & problem.is_busy, possible - reached, 0.0)
    takes = np.zeros_like(problem.is_busy)
    for layer in np.argsort(-gain, kind="stable").tolist():
        is_enough = target is not None and reached[problem.is_busy].mean() >= target
        if is_enough or gain[layer] <= LEAST_LAYER_GAIN:
            break
        takes[layer], reached[layer] = True, possible[layer]
    return mixed(problem, takes, placed, anew)


def _adopted(
    problem: Problem, table: ExpertTable, algorithm: Algorithm, *, samples: float | None
) -> Plan:
    """The plan that keeps the layers to which `table` gives nothing."""
    kept = _kept(problem, samples=samples)
    anew = weigh(problem, table, may_chain=algorithm is Algorithm.GLOBAL)
    changes, comparison = _worth_changing(problem, kept, anew, samples=samples)
    placed = mixed(problem, changes, kept, anew)
    made = _summary(problem, placed, algorithm)
    changed = int((placed.table != problem.held).any(axis=1).sum())
    return replace(
        made,
        reason=f"{algorithm}: {made.balancedness:.3f} by changing {changed} of {len(table)} layers"
        f"{_share_words(problem, placed)}{comparison}",
    )


def _kept(problem: Problem, *, samples: float | None) -> Placed:
    """What is held, with other shares in the layers to which these give something."""
    held = Placed(problem.held, problem.held_shares)
    if problem.weighted is Weighting.OFF and held.shares is None:
        return held
    other = weigh(problem, held.table, may_chain=False)
    changes, _ = _worth_changing(problem, held, other, samples=samples)
    return mixed(problem, changes, held, other)


def _worth_changing(
    problem: Problem, one: Placed, other: Placed, *, samples: float | None
) -> tuple[Bools, str]:
    """Layers that gain more than jitter and chance, [layers], and in words why others do not."""
    before, after = (problem.balancedness_of_layer(*placed) for placed in (one, other))
    # A pool that holds nothing yet has nothing to keep for the sake of it.
    least_gain = 0.0 if problem.is_new else LEAST_LAYER_GAIN
    changes, comparison = after - before > least_gain, ""
    if samples is not None:
        beyond, words = gains_beyond_chance(problem, 1 / before - 1 / after, samples=samples)
        num_kept = int((changes & ~beyond).sum())
        if num_kept:
            comparison = f"; {num_kept} layers keep their placement: {words}"
        changes &= beyond
    return changes | ~problem.is_covered, comparison


def _share_words(problem: Problem, placed: Placed) -> str:
    if placed.shares is None:
        return ""
    even = even_shares(placed.table, num_experts=problem.model.num_experts)
    uneven = int((placed.shares != even).any(axis=1).sum())
    return f"; replicas serve uneven shares in {uneven} of {len(even)} layers"


def _summary(problem: Problem, placed: Placed, algorithm: Algorithm) -> Plan:
    """A plan with all its numbers, for all ranks of the problem and still without a reason."""
    busy, rank_load = problem.is_busy, problem.rank_loads(*placed)
    per_layer = balancedness_per_layer(rank_load)
    bounds = upper_bounds(
        problem.load,
        num_slots=problem.topology.num_slots,
        num_ranks=problem.topology.num_ranks,
    )
    return Plan(
        expert_of_slot=placed.table,
        share_of_slot=placed.shares,
        ranks=tuple(range(problem.topology.num_ranks)),
        algorithm=algorithm,
        balancedness=mean_if_busy(per_layer, is_busy=rank_load.max(axis=1) > 0),
        balancedness_of_layer=per_layer,
        bound=float(bounds[busy].mean()) if busy.any() else 1.0,
        moves=int(np.count_nonzero(placed.table != problem.held)),
        off_node_share=_off_node_share(problem, placed),
        reason="",
    )


def _off_node_share(problem: Problem, placed: Placed) -> float:
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    total = problem.load.sum()
    if num_groups < num_nodes or num_nodes == 1 or total <= 0:
        return 0.0
    return 1.0 - float(problem.load_of_group_on_node(*placed).max(axis=2).sum() / total)

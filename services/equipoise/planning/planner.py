"""`plan`: the layout that a load asks for, as close as possible to the one in use."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from equipoise.planning.balance import balancedness
from equipoise.planning.bound import upper_bounds
from equipoise.planning.chance import gains_beyond_chance
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.incremental import Step, improve
from equipoise.planning.layout import ExpertTable, Layout
from equipoise.planning.load import Load
from equipoise.planning.locality import place_locally
from equipoise.planning.placing import place_globally, place_hierarchically
from equipoise.planning.policy import Algorithm
from equipoise.planning.problem import Problem
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
    ascending order. `algorithm` is the one that made it, never `auto`. `balancedness` is the mean
    over the layers with traffic of `balancedness_of_layer`, [layers]; `bound` is a balancedness
    that no placement with even splits exceeds. `moves` counts slots that change. `off_node_share`
    is the share of the load that is served off the node that serves most of its expert group; 0
    where there are fewer groups than nodes, so that nothing has a home.

    An incremental plan also has its `steps`, most gain per move first, of which any prefix is a
    valid layout and worth having; and the `curve` of what any number of moves buys at best:
    (moves, balancedness).
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
    steps: tuple[Step, ...] = ()
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

    Raises:
        InvalidLayoutError: there are fewer slots than experts.
    """
    ranks = tuple(rank for rank in range(topology.num_ranks) if rank not in exclude_ranks)
    if not ranks:
        raise InvalidLayoutError("no rank is left to plan for: exclude fewer")
    problem = Problem.of(load, model=model, topology=topology, current=current, ranks=ranks)
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
    before = balancedness(problem.rank_loads(problem.held))
    if target is not None and before >= target and problem.is_covered.all():
        made = _summary(problem, problem.held, Algorithm.INCREMENTAL)
        return replace(
            made, reason=f"nothing to move: {before:.3f} is at the target of {target:.3f} already"
        )
    fresh = place_globally(problem)
    layers, comparison = _worth_changing(problem, fresh, samples=samples)
    better = improve(
        problem,
        layers=layers,
        fresh=fresh,
        least_gain=LEAST_LAYER_GAIN,
        target=target,
        max_moves=max_moves,
    )
    made = _summary(problem, better.table, Algorithm.INCREMENTAL)
    reason = f"incremental: {made.balancedness:.3f} after {before:.3f} by {made.moves} moves"
    if target is not None and made.balancedness < target:
        reason += f"; the target of {target:.3f} is out of reach"
    return replace(made, steps=better.steps, curve=better.curve, reason=reason + comparison)


def _adopted(
    problem: Problem, table: ExpertTable, algorithm: Algorithm, *, samples: float | None
) -> Plan:
    """The plan that keeps the layers to which `table` gives nothing."""
    changes, comparison = _worth_changing(problem, table, samples=samples)
    made = _summary(problem, np.where(changes[:, None], table, problem.held), algorithm)
    changed = int((made.expert_of_slot != problem.held).any(axis=1).sum())
    return replace(
        made,
        reason=f"{algorithm}: {made.balancedness:.3f} by changing {changed} of {len(table)} layers"
        f"{comparison}",
    )


def _worth_changing(
    problem: Problem, table: ExpertTable, *, samples: float | None
) -> tuple[npt.NDArray[np.bool_], str]:
    """Layers that gain more than jitter and chance, [layers], and in words why others do not."""
    before, after = (problem.balancedness_of_layer(placed) for placed in (problem.held, table))
    changes, comparison = after - before > LEAST_LAYER_GAIN, ""
    if samples is not None:
        beyond, words = gains_beyond_chance(problem, 1 / before - 1 / after, samples=samples)
        num_kept = int((changes & ~beyond).sum())
        if num_kept:
            comparison = f"; {num_kept} layers keep their placement: {words}"
        changes &= beyond
    return changes | ~problem.is_covered, comparison


def _summary(problem: Problem, table: ExpertTable, algorithm: Algorithm) -> Plan:
    """A plan with all its numbers, for all ranks of the problem and still without a reason."""
    busy = problem.load.sum(axis=1) > 0
    bounds = upper_bounds(
        problem.load,
        num_slots=problem.topology.num_slots,
        num_ranks=problem.topology.num_ranks,
    )
    return Plan(
        expert_of_slot=table,
        ranks=tuple(range(problem.topology.num_ranks)),
        algorithm=algorithm,
        balancedness=balancedness(problem.rank_loads(table)),
        balancedness_of_layer=problem.balancedness_of_layer(table),
        bound=float(bounds[busy].mean()) if busy.any() else 1.0,
        moves=int(np.count_nonzero(table != problem.held)),
        off_node_share=_off_node_share(problem, table),
        reason="",
    )


def _off_node_share(problem: Problem, table: ExpertTable) -> float:
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    total = problem.load.sum()
    if num_groups < num_nodes or num_nodes == 1 or total <= 0:
        return 0.0
    return 1.0 - float(problem.load_of_group_on_node(table).max(axis=2).sum() / total)

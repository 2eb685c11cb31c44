"""`plan`: a balanced layout for a load, as close as possible to the one in use."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Load, ShareTable, Weights
from equipoise.planning.balance import mean_if_busy
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, count_moves
from equipoise.planning.placing.chance import chance_of_layer, gains_beyond_chance
from equipoise.planning.placing.cover import cover
from equipoise.planning.placing.from_scratch import place_globally, place_hierarchically
from equipoise.planning.placing.incremental import Improvement, improve
from equipoise.planning.placing.locality import Homes, place_locally, strays
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.weigh import Placed, mixed, weigh
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.planning.shares import even_shares
from equipoise.planning.topology import ModelShape, Topology

LEAST_LAYER_GAIN = 0.002
"""Balancedness that a layer must gain for its experts to move: smaller gains are jitter."""

LOCALITY = 0.25
"""Locality of `local` unless the caller sets it: on recorded loads of a 256-expert model on 4 nodes
it is enough for a balancedness of 0.97 or more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A valid placement, the balance it reaches on the load it is for, and its cost."""

    expert_of_slot: ExpertTable
    """int32 [layers, slots] over the slots of `ranks`."""
    ranks: tuple[int, ...]
    """The ranks planned for, ascending."""
    algorithm: Algorithm
    """The algorithm that made it, never `auto`."""
    balancedness: float
    """Mean of `balancedness_of_layer` over the layers with traffic."""
    balancedness_of_layer: Load
    """Mean / max rank load per layer, [layers]."""
    bound: float
    """A balancedness that no placement exceeds."""
    moves: int
    """Slots that change their expert."""
    off_node_share: float
    """Share of the load served off the node that serves most of its expert group; 0 where there are
    fewer groups than nodes."""
    reason: str
    share_of_slot: ShareTable | None = None
    """Shares, int32 [layers, slots]; None if all are even."""
    returned_layers: int = 0
    """Layers whose expert groups return to their nodes, whatever balance that costs: `hierarchical`
    and a locality ask for it."""
    evened_layers: int = 0
    """Layers in which ranks get equally many slots again, whatever balance that costs."""
    curve: tuple[tuple[int, float], ...] = ()
    """(moves, balancedness), both increasing: the most that any number of moves buys with even
    splits, by an incremental plan; with pooled slots only the placements that were tried."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """A problem, and the options that only some algorithms know."""

    problem: Problem
    samples: float | None
    locality: float | None
    max_moves: int | None
    target: float | None
    least_gain_per_move: float


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
    weights: Weights | None = None,
    least_gain_per_move: float = 0.0,
) -> Plan:
    """Place experts so that ranks carry even parts of a load.

    A layer keeps its current placement unless it gains something, so a layer without load never
    moves and no plan is worse than the current layout. (Beside layers with uneven shares, even
    splits are rounded to whole shares too: n replicas may then cost n / 32768 of balancedness.)
    `hierarchical`, and any plan with a locality, also change layers that spread expert groups over
    more nodes than allowed, even at a loss.

    Args:
        load: [layers, experts] in any unit; [kinds, layers, experts] with `weights`. Balancedness
            is then the mean over kinds of traffic.
        model: the shape of the model.
        topology: the ranks and their nodes.
        current: the layout in use; None for a pool that holds nothing yet.
        algorithm: `auto` makes a hierarchical and a global plan and keeps the more balanced one,
            hierarchical on a tie; with a locality it is `local`, with a limit `incremental`.
        locality: a dial from 0 (hierarchical) to 1 (global), see `place_locally`: for `local`, and
            for `incremental`, which otherwise takes no account of groups and nodes.
        max_moves: the most moves, for `incremental`.
        target_balancedness: the balancedness at which `incremental` stops.
        exclude_ranks: ranks that get no experts; those that only they held go to the others.
        samples: assignments per layer in the load; with it, layers whose gain chance explains keep
            their placement.
        weighted: whether an expert's slots may serve unequal shares. If so, layers are first
            relieved by new shares where their experts are, which moves nothing. Plans that may put
            any expert anywhere also try placements made for uneven shares (`place_weighted`). No
            layer is less balanced than with even splits.
        weights: the part of the time that each kind of traffic takes, [kinds]; sums to 1.
        least_gain_per_move: the balancedness that a move must gain, for `incremental`.

    Raises:
        InvalidLayoutError: there are fewer slots than experts, or no ranks.
    """
    ranks = tuple(rank for rank in range(topology.num_ranks) if rank not in exclude_ranks)
    if not ranks:
        raise InvalidLayoutError("no rank is left to plan for: exclude fewer ranks")
    is_limited = max_moves is not None or target_balancedness is not None
    if algorithm is Algorithm.AUTO and (is_limited or locality is not None):
        algorithm = Algorithm.INCREMENTAL if is_limited else Algorithm.LOCAL
    assert algorithm is Algorithm.INCREMENTAL or not is_limited, "only incremental has limits"
    assert locality is None or algorithm in {Algorithm.LOCAL, Algorithm.INCREMENTAL}
    problem = Problem.of(
        load,
        model=model,
        topology=topology,
        current=current,
        ranks=ranks,
        weighted=weighted,
        weights=weights,
    )
    task = _Task(
        problem=problem,
        samples=samples,
        locality=LOCALITY if locality is None and algorithm is Algorithm.LOCAL else locality,
        max_moves=max_moves,
        target=target_balancedness,
        least_gain_per_move=least_gain_per_move,
    )
    obstacle = None
    if algorithm is Algorithm.INCREMENTAL:
        if locality is not None and locality < 1.0:
            obstacle = problem.obstacle_to_hierarchy()
        if locality == 1.0 or obstacle is not None:
            task = replace(task, locality=None)
    elif algorithm is not Algorithm.GLOBAL and (obstacle := problem.obstacle_to_hierarchy()):
        algorithm = Algorithm.GLOBAL
    made = _METHODS[algorithm](task)
    reason = made.reason if obstacle is None else f"{made.reason}; not hierarchical: {obstacle}"
    return replace(made, ranks=ranks, reason=reason)


def _plan_both_ways(task: _Task) -> Plan:
    hierarchical, other = _plan_hierarchically(task), _plan_globally(task)
    loser, winner = sorted((other, hierarchical), key=lambda made: made.balancedness)
    # Either would do, so the winner is judged by its balance alone.
    reason = f"{winner.reason}; {loser.algorithm}: {loser.balancedness:.3f}"
    return replace(winner, reason=reason, returned_layers=0)


def _plan_hierarchically(task: _Task) -> Plan:
    return _adopted(task, place_hierarchically(task.problem), Algorithm.HIERARCHICAL)


def _plan_locally(task: _Task) -> Plan:
    assert task.locality is not None
    table = place_locally(task.problem, locality=task.locality)
    made = _adopted(task, table, Algorithm.LOCAL)
    at_home = 1.0 - made.off_node_share
    return replace(made, reason=f"{made.reason}; {at_home:.1%} of the load stays on its home node")


def _plan_globally(task: _Task) -> Plan:
    return _adopted(task, place_globally(task.problem), Algorithm.GLOBAL)


def _plan_incrementally(task: _Task) -> Plan:
    problem, target, samples = task.problem, task.target, task.samples
    held = Placed(problem.held, problem.held_shares)
    before = problem.balancedness(*held)
    returns = np.zeros_like(problem.is_busy)
    if task.locality is not None:
        # At even splits, as steps are made: new shares alone never make a layer stray.
        returns = strays(problem, held.table, None, locality=task.locality)
    may_stay = problem.is_valid.all() and not returns.any()
    if target is not None and before >= target and may_stay:
        made = summary(problem, held, Algorithm.INCREMENTAL)
        return replace(
            made, reason=f"nothing to move: {before:.3f} has reached the target of {target:.3f}"
        )
    kept = _kept(problem, samples=samples)
    standing = problem.balancedness_of_layer(*kept)
    if target is not None and may_stay:
        made = summary(problem, kept, Algorithm.INCREMENTAL)
        if made.balancedness >= target:
            return replace(
                made,
                reason=f"incremental: {made.balancedness:.3f} after {before:.3f} by shares alone",
            )
    layers, hopeless = _gaining(problem, standing, problem.bound_of_layer, samples=samples)
    placed, better = _improved(task, kept, layers, returns)
    changes, comparison = _worth_changing(problem, kept, placed, samples=samples)
    placed = mixed(problem, changes | returns, kept, placed)
    made = summary(problem, placed, Algorithm.INCREMENTAL)
    reason = f"incremental: {made.balancedness:.3f} after {before:.3f} by {made.moves} moves"
    if num_lost := int((problem.replicas(problem.held) == 0).sum()):
        reason += f", {num_lost} of which restore lost experts ({before:.3f} is without their load)"
    if target is not None and made.balancedness < target:
        reason += f"; the target of {target:.3f} is out of reach"
    if returns.any():
        reason += f"; expert groups of {returns.sum()} layers return to their nodes"
    return replace(
        made,
        returned_layers=int(returns.sum()),
        curve=better.curve,
        reason=reason + _shares_text(problem, placed) + (comparison or hopeless),
    )


def _improved(
    task: _Task, kept: Placed, layers: Bools, returns: Bools
) -> tuple[Placed, Improvement]:
    """Improve some layers by moves, or by placements from scratch where shares need them.

    Those that return begin from one that keeps groups on their nodes.
    """
    problem = task.problem
    # Steps stop where chance hides what is left.
    noise = None if task.samples is None else chance_of_layer(problem, samples=task.samples) / 2
    fresh, homes = place_globally(problem, noise=noise), None
    if task.locality is not None:
        local = place_locally(problem, locality=task.locality)
        # Groups keep their nodes: to give them others takes most of the moves there are.
        fresh = np.where(returns[:, None], local, cover(problem))
        homes = Homes.of_table(problem, fresh, locality=task.locality)
    better = improve(
        problem,
        layers=layers,
        fresh=fresh,
        standing=problem.balancedness_of_layer(*kept),
        least_gain=LEAST_LAYER_GAIN,
        target=task.target,
        max_moves=task.max_moves,
        homes=homes,
        returns=returns,
        least_slope=task.least_gain_per_move,
        noise=noise,
    )
    moved = (better.table != problem.held).any(axis=1)
    placed = mixed(problem, moved, kept, weigh(problem, better.table, may_chain=False))
    if problem.weighted is not Weighting.OFF and task.max_moves is None and homes is None:
        chained = weigh(problem, fresh, may_chain=True)
        placed = _from_scratch_where_needed(
            problem, placed, chained, layers=layers, target=task.target
        )
    return placed, better


def _from_scratch_where_needed(
    problem: Problem,
    placed: Placed,
    fresh: Placed,
    *,
    layers: Bools,
    target: float | None,
) -> Placed:
    """Replace the layers that gain most by a placement from scratch, up to the target."""
    reached, possible = (problem.balancedness_of_layer(*one) for one in (placed, fresh))
    gain = np.where(layers & problem.is_busy, possible - reached, 0.0)
    takes = np.zeros_like(problem.is_busy)
    for layer in np.argsort(-gain, kind="stable").tolist():
        balance = mean_if_busy(reached, is_busy=problem.is_busy)
        is_enough = target is not None and balance >= target
        if is_enough or gain[layer] <= LEAST_LAYER_GAIN:
            break
        takes[layer], reached[layer] = True, possible[layer]
    return mixed(problem, takes, placed, fresh)


def _adopted(task: _Task, table: ExpertTable, algorithm: Algorithm) -> Plan:
    """Take `table` in the layers that gain by it or stray now, and keep the others."""
    problem = task.problem
    kept = _kept(problem, samples=task.samples)
    fresh = weigh(problem, table, may_chain=algorithm is Algorithm.GLOBAL)
    changes, comparison = _worth_changing(problem, kept, fresh, samples=task.samples)
    returns = np.zeros_like(problem.is_busy)
    if algorithm is not Algorithm.GLOBAL:
        locality = 0.0 if task.locality is None else task.locality
        before, after = (strays(problem, *one, locality=locality) for one in (kept, fresh))
        returns = before & ~after
    placed = mixed(problem, changes | returns, kept, fresh)
    made = summary(problem, placed, algorithm)
    changed = int((placed.table != problem.held).any(axis=1).sum())
    reason = f"{algorithm}: {made.balancedness:.3f} by changing {changed} of {len(table)} layers"
    if returns.any():
        reason += f", {returns.sum()} of them to return expert groups to their nodes"
    return replace(
        made,
        returned_layers=int(returns.sum()),
        reason=reason + _shares_text(problem, placed) + comparison,
    )


def _kept(problem: Problem, *, samples: float | None) -> Placed:
    """The held placement, with new shares in the layers that gain by them."""
    held = Placed(problem.held, problem.held_shares)
    if problem.weighted is Weighting.OFF and held.shares is None:
        return held
    other = weigh(problem, held.table, may_chain=False)
    changes, _ = _worth_changing(problem, held, other, samples=samples)
    return mixed(problem, changes, held, other)


def _worth_changing(
    problem: Problem, one: Placed, other: Placed, *, samples: float | None
) -> tuple[Bools, str]:
    """Find layers that the other placement improves, [layers]; say why others do not gain."""
    before, after = (problem.balancedness_of_layer(*placed) for placed in (one, other))
    return _gaining(problem, before, after, samples=samples)


def _gaining(
    problem: Problem, before: Load, after: Load, *, samples: float | None
) -> tuple[Bools, str]:
    """Find layers that gain more than jitter and chance, [layers]; say why others do not."""
    # A pool that holds nothing yet has no placement worth keeping.
    least_gain = 0.0 if problem.is_new else LEAST_LAYER_GAIN
    changes, comparison = after - before > least_gain, ""
    if samples is not None:
        beyond, text = gains_beyond_chance(problem, 1 / before - 1 / after, samples=samples)
        num_kept = int((changes & ~beyond).sum())
        if num_kept:
            comparison = f"; {num_kept} layers keep their placement: {text}"
        changes &= beyond
    return changes | ~problem.is_valid, comparison


def _shares_text(problem: Problem, placed: Placed) -> str:
    if placed.shares is None:
        return ""
    even = even_shares(placed.table, num_experts=problem.model.num_experts)
    uneven = int((placed.shares != even).any(axis=1).sum())
    return f"; replicas serve uneven shares in {uneven} of {len(even)} layers"


def summary(problem: Problem, placed: Placed, algorithm: Algorithm) -> Plan:
    """Build a plan with all its figures for all ranks of the problem; the reason is empty."""
    busy, per_layer = problem.is_busy, problem.balancedness_of_layer(*placed)
    return Plan(
        expert_of_slot=placed.table,
        share_of_slot=placed.shares,
        ranks=tuple(range(problem.topology.num_ranks)),
        algorithm=algorithm,
        balancedness=mean_if_busy(per_layer, is_busy=busy),
        balancedness_of_layer=per_layer,
        bound=mean_if_busy(problem.bound_of_layer, is_busy=busy),
        moves=count_moves(problem.held, placed.table),
        off_node_share=_off_node_share(problem, placed),
        reason="",
    )


def _off_node_share(problem: Problem, placed: Placed) -> float:
    num_groups, num_nodes = problem.model.num_groups, problem.num_nodes
    total = problem.load.sum()
    if num_groups < num_nodes or num_nodes == 1 or total <= 0:
        return 0.0
    return 1.0 - float(problem.load_of_group_on_node(*placed).max(axis=2).sum() / total)


_METHODS: dict[Algorithm, Callable[[_Task], Plan]] = {
    Algorithm.AUTO: _plan_both_ways,
    Algorithm.HIERARCHICAL: _plan_hierarchically,
    Algorithm.LOCAL: _plan_locally,
    Algorithm.GLOBAL: _plan_globally,
    Algorithm.INCREMENTAL: _plan_incrementally,
}

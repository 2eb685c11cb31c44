"""`improve`: the fewest moves to a target balancedness, or the most balance for a move budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.cover import cover
from equipoise.planning.placing.frontier import LayerPath, Point, hull_along, hull_of, take_steepest
from equipoise.planning.placing.locality import Homes
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.refine import refine
from equipoise.planning.placing.relieve import relieve
from equipoise.planning.placing.search_state import Goal, SearchSpace
from equipoise.planning.placing.settle import settle

THRESHOLDS = (1.0, 1.02, 1.06, 1.15)
"""Relief thresholds of paths, in multiples of the lowest possible load of the busiest rank."""

COST_OF_JOINING = 0.5
"""Moves that are made rather than bring a replica to a node that has the expert: one failure may
take both. With drifting synthetic loads on 2 nodes, 4 % of the replicated experts are then on one
node only and 7 % more moves are made; at a cost of 0, 21 % are, and at 1, 2 % for 14 % more moves.
"""

COST_OF_LEAVING = 10.0
"""Moves that are made rather than let a mean rank load leave its home node."""

TARGET_THRESHOLDS = (0.25, 0.8, 1.5, 3.0)
"""Relief thresholds on the way to a target, in multiples of the excess that the target leaves:
layers that gain easily exceed the target, others stop short of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveStep:
    """Slots of one layer that change together, and the gain.

    Steps of one layer keep their order. The layout after any step is valid.
    """

    layer: int
    slots: Indices
    """[changes]: the slots that change."""
    experts: Slots
    """[changes]: their new experts."""
    moves: int
    """Increase in the number of slots that differ from the placement in use."""
    gain: float
    """Increase of balancedness, averaged over the layers with traffic."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Improvement:
    """A placement and the steps to it."""

    table: ExpertTable
    """int32 [layers, slots]."""
    steps: tuple[MoveStep, ...]
    """Steps that make the placement valid, then the others, most gain per move first."""
    curve: tuple[tuple[int, float], ...]
    """(moves, balancedness): the most balance for any number of moves, both increasing."""


def improve(
    problem: Problem,
    *,
    layers: Bools,
    fresh: ExpertTable,
    standing: Load,
    least_gain: float,
    target: float | None = None,
    max_moves: int | None = None,
    homes: Homes | None = None,
    returns: Bools | None = None,
    least_slope: float = 0.0,
    noise: Weights | None = None,
) -> Improvement:
    """Improve the placement in use.

    Without a target or a move budget, improves as far as possible. With `homes`, no step makes more
    load leave its home node than may.

    Args:
        problem: the load and the placement in use.
        layers: the layers to improve, bool [layers].
        fresh: a placement from scratch, int32 [layers, slots], for layers where small steps lead
            to less balance by `least_gain`, or need more moves.
        standing: balancedness of valid layers with their shares, [layers]. Steps split experts
            evenly, so those of a layer with shares must exceed it.
        least_gain: see `fresh`.
        target: stop when the mean balancedness over `layers` with traffic reaches it.
        max_moves: the move budget; moves that restore lost experts and those of layers that return
            are always made, and count.
        homes: where experts should be served; anywhere by default.
        returns: the layers that start from the fresh placement, because groups must return to
            their nodes; none by default.
        least_slope: stop where a move gains less balancedness than this.
        noise: the excess that chance hides, in mean rank loads, [layers]: to take it off a rank
            gains nothing.
    """
    begin = _begin(problem, layers, fresh, standing, target=target, returns=returns, noise=noise)
    busy, start, target = problem.is_busy, begin.table, begin.target
    num_busy = max(int(busy.sum()), 1)
    paths = [
        _paths(problem, begin, layer, homes=homes)
        if begin.climbs[layer]
        else [_standing(begin.reached[layer])]
        for layer in range(len(start))
    ]
    if max_moves is None and not _reach(paths, busy, target):
        _offer(problem, begin, paths, fresh, least_gain=least_gain)
        if homes is None:
            ends = _settled_ends(problem, begin, paths)
            _offer(problem, begin, paths, ends, least_gain=least_gain)
    restoring = list(_restoring(problem, start, begin.is_kept))
    num_restoring = sum(step.moves for step in restoring)
    taken, curve = take_steepest(
        [hull_of(of_one) for of_one in paths],
        num_busy=num_busy,
        start=float(begin.reached[busy].mean()) if busy.any() else 1.0,
        target=target,
        max_moves=None if max_moves is None else max(0, max_moves - num_restoring),
        least_slope=least_slope,
    )
    steps = [
        step
        for layer, end in enumerate(taken)
        for step in _steps(layer, start[layer], paths[layer][end.path], end, num_busy)
    ]
    steps.sort(key=lambda step: -step.gain / step.moves)
    ordered = (*restoring, *steps)
    table = problem.held.copy()
    for step in ordered:
        table[step.layer, step.slots] = step.experts
    counted = tuple((moves + num_restoring, balance) for moves, balance in curve)
    return Improvement(table=table, steps=ordered, curve=counted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Begin:
    """Where the paths of all layers begin."""

    table: ExpertTable
    """int32 [layers, slots]; holds every expert."""
    is_kept: Bools
    """Whether that is the placement in use, [layers]."""
    climbs: Bools
    """The layers to improve, [layers]."""
    reached: Load
    """Balancedness that counts, [layers]: no more than chance lets see."""
    noise: Weights
    """The excess that chance hides, in mean rank loads, [layers]."""
    target: float | None
    """Mean balancedness to reach, with the layers that stay as they are."""


def _begin(
    problem: Problem,
    layers: Bools,
    fresh: ExpertTable,
    standing: Load,
    *,
    target: float | None,
    returns: Bools | None,
    noise: Weights | None,
) -> _Begin:
    table, is_kept, busy = cover(problem), problem.is_valid, problem.is_busy
    if returns is not None:
        table, is_kept = np.where(returns[:, None], fresh, table), is_kept & ~returns
    noise = np.zeros(len(table)) if noise is None else noise
    reached = np.where(is_kept, standing, problem.balancedness_of_layer(table))
    reached = np.minimum(reached, 1.0 / (1.0 + noise))
    if target is not None and busy.any():
        # Layers that stay cannot help to reach it, and the others shall not make up for them.
        target = float(np.where(layers, target, reached)[busy].mean())
    return _Begin(
        table=table,
        is_kept=is_kept,
        climbs=layers & busy,
        reached=reached,
        noise=noise,
        target=target,
    )


def _standing(reached: float) -> LayerPath:
    """Build the path of a layer that stays."""
    return LayerPath(
        changes=np.empty((0, 2), dtype=np.int64),
        moves=np.zeros(1, dtype=np.int64),
        balancedness=np.array([reached]),
    )


def _settled_ends(problem: Problem, begin: _Begin, paths: list[list[LayerPath]]) -> ExpertTable:
    """Refine the most balanced placement of each layer's paths and take back needless moves."""
    table = begin.table.copy()
    for layer, of_layer in enumerate(paths):
        path = max(of_layer, key=lambda path: float(path.balancedness.max()))
        for slot, expert in path.changed(0, int(path.balancedness.argmax())).tolist():
            table[layer, slot] = expert
    anywhere = np.zeros_like(problem.node_of_rank)
    refined = refine(
        table, load=problem.load, first_slot=problem.first_slot, block_of_rank=anywhere
    )
    gains = problem.balancedness_of_layer(refined) > problem.balancedness_of_layer(table)
    table = np.where(gains[:, None], refined, table)
    return settle(problem, table, begin.table, noise=begin.noise)


def _offer(
    problem: Problem,
    begin: _Begin,
    paths: list[list[LayerPath]],
    table: ExpertTable,
    *,
    least_gain: float,
) -> None:
    """Add a placement to the paths of layers where it is more balanced, or needs fewer moves."""
    possible = np.minimum(problem.balancedness_of_layer(table), 1.0 / (1.0 + begin.noise))
    num_moves = (table != begin.table).sum(axis=1)
    for layer in np.flatnonzero(begin.climbs & (num_moves > 0)).tolist():
        ends = [path.point(int(path.balancedness.argmax())) for path in paths[layer]]
        best = max(ends, key=lambda end: (end.balancedness, -end.moves))
        if possible[layer] > best.balancedness + least_gain or num_moves[layer] < best.moves:
            reached = np.array([begin.reached[layer], possible[layer]])
            paths[layer].append(_in_one_step(begin.table[layer], table[layer], reached))


def _in_one_step(start: Slots, fresh: Slots, balancedness: Load) -> LayerPath:
    """Build the path that goes to another placement at once; `balancedness` is [2]."""
    changed = np.flatnonzero(start != fresh)
    pairs = np.stack((changed, fresh[changed]), axis=1)
    return LayerPath(
        changes=pairs.astype(np.int64).reshape(1, -1),
        moves=np.array([0, len(changed)]),
        balancedness=balancedness,
    )


def _paths(problem: Problem, begin: _Begin, layer: int, *, homes: Homes | None) -> list[LayerPath]:
    """Build one path per threshold; the common start is the first point."""
    start, target, noise = begin.table[layer], begin.target, begin.noise[layer]
    load, weights = np.ascontiguousarray(problem.load_of_kinds[layer]), problem.weights
    bounds = problem.bounds_of_kinds[:, layer]
    thresholds = THRESHOLDS
    if target is not None and target < problem.bound_of_layer[layer]:
        left = problem.bound_of_layer[layer] / target - 1.0
        thresholds = tuple(1.0 + left * part for part in TARGET_THRESHOLDS)
    home_of_expert, per_leaving, may_leave = np.zeros(len(load), dtype=np.int64), 0.0, np.inf
    if homes is not None:
        home_of_expert, per_leaving = homes.of_expert[layer], COST_OF_LEAVING
        may_leave = float(homes.may_leave[layer])
    space = SearchSpace(
        problem.first_slot,
        problem.rank_of_slot,
        problem.node_of_rank,
        home_of_expert,
        1.0,
        per_leaving,
        COST_OF_JOINING if homes is None and problem.num_nodes > 1 else 0.0,
    )
    paths = []
    for threshold in sorted({max(threshold, 1.0 + noise) for threshold in thresholds}):
        made = relieve(start, load, space, Goal(threshold / bounds, weights, may_leave))
        balancedness = (weights / np.maximum(made.busiest, 1.0 + noise)).sum(axis=1)
        balancedness[0] = begin.reached[layer]
        paths.append(LayerPath(changes=made.steps, moves=made.moves, balancedness=balancedness))
    return paths


def _reach(paths: list[list[LayerPath]], busy: Bools, target: float | None) -> bool:
    best = [max(path.balancedness.max() for path in of_layer) for of_layer in paths]
    return target is not None and bool(busy.any() and np.array(best)[busy].mean() >= target)


def _restoring(problem: Problem, start: ExpertTable, is_kept: Bools) -> Iterator[MoveStep]:
    """Yield the steps that restore lost experts, undo needless twins, or return groups to nodes.

    At any price, and in any order.
    """
    for layer in np.flatnonzero(~is_kept).tolist():
        changed = np.flatnonzero(problem.held[layer] != start[layer])
        yield MoveStep(
            layer=layer,
            slots=changed,
            experts=start[layer, changed],
            moves=len(changed),
            gain=0.0,
        )


def _steps(
    layer: int, slots: Slots, path: LayerPath, end: Point, num_busy: int
) -> Iterator[MoveStep]:
    """Yield the steps worth making on the way to `end`."""
    hull = hull_along(path, num_changes=end.num_changes)
    for before, after in pairwise(hull):
        reached = slots.copy()
        for slot, expert in path.changed(before.num_changes, after.num_changes).tolist():
            reached[slot] = expert
        differs = np.flatnonzero(reached != slots)
        yield MoveStep(
            layer=layer,
            slots=differs,
            experts=reached[differs],
            moves=after.moves - before.moves,
            gain=(after.balancedness - before.balancedness) / num_busy,
        )
        slots = reached

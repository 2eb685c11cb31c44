"""`improve`: the fewest moves from the placement in use to a target, or the most for a budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from equipoise.planning.arrays import Bools, ExpertTable, Indices, Load, Slots
from equipoise.planning.placing.bound import upper_bounds
from equipoise.planning.placing.cover import cover
from equipoise.planning.placing.frontier import LayerPath, Point, hull_along, hull_of, take_steepest
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.relieve import relieve
from equipoise.planning.placing.search_state import SearchSpace

THRESHOLDS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.15, 1.3)
"""Loads, over the least that a layer's busiest rank can have, above which paths relieve ranks."""

TARGET_THRESHOLDS = (0.25, 0.5, 0.8, 1.1, 1.5, 2.2, 3.5)
"""The same on the way to a target, in units of the excess that the target leaves: layers that gain
easily go beyond it, others stop before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveStep:
    """Slots of one layer that change together, and what that is worth.

    `slots`, int64, and `experts`, int32, are [changes]; `moves` is how many slots more differ from
    the placement in use; `gain` is in balancedness, mean over the layers with traffic. Steps of
    one layer keep their order; the layout after any step is valid.
    """

    layer: int
    slots: Indices
    experts: Slots
    moves: int
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Improvement:
    """A placement, int32 [layers, slots], and the steps to it, most gain per move first.

    Steps that bring back experts without any replica come before all others. `curve` has what any
    number of moves buys at best: (moves, balancedness), both growing.
    """

    table: ExpertTable
    steps: tuple[MoveStep, ...]
    curve: tuple[tuple[int, float], ...]


def improve(
    problem: Problem,
    *,
    layers: Bools,
    fresh: ExpertTable,
    standing: Load,
    least_gain: float,
    target: float | None = None,
    max_moves: int | None = None,
) -> Improvement:
    """Improve the placement in use in the given `layers`, bool [layers].

    Stops as soon as the mean balancedness over layers with traffic reaches `target`, leaves out
    what does not fit into `max_moves` (moves that bring back lost experts always do), and with
    neither goes as far as it can. `fresh` is a placement from scratch, int32 [layers, slots]: the
    way out for layers where it is more balanced by `least_gain` than what small steps reach.
    `standing`, [layers], is what covered layers reach with the shares they may have: steps split
    evenly, so those that start in a layer with shares must come out above that.
    """
    start = cover(problem)
    busy = problem.is_busy
    reached = np.where(problem.is_covered, standing, problem.balancedness_of_layer(start))
    paths = [
        _paths(problem, start, layer, reached=reached[layer], target=target)
        if layers[layer] and busy[layer]
        else [_standstill(reached[layer])]
        for layer in range(len(start))
    ]
    if max_moves is None and not _reach(paths, busy, target):
        reached_fresh = problem.balancedness_of_layer(fresh)
        for layer in np.flatnonzero(layers & busy).tolist():
            best = max(path.balancedness.max() for path in paths[layer])
            if reached_fresh[layer] > best + least_gain:
                ends_at = (reached[layer], reached_fresh[layer])
                paths[layer].append(_at_once(start[layer], fresh[layer], ends_at))
    ends, curve = take_steepest(
        [hull_of(of_one) for of_one in paths],
        num_busy=max(int(busy.sum()), 1),
        start=float(reached[busy].mean()) if busy.any() else 1.0,
        target=target,
        max_moves=max_moves,
    )
    return _improvement(problem, start, paths, ends, curve)


def _paths(
    problem: Problem, start: ExpertTable, layer: int, *, reached: float, target: float | None
) -> list[LayerPath]:
    """Paths that relieve ranks above several thresholds; the common start is the first point."""
    load, num_ranks = problem.load[layer], problem.topology.num_ranks
    mean = float(load.sum()) / num_ranks
    bound = upper_bounds(load[None], num_slots=start.shape[1], num_ranks=num_ranks)[0]
    thresholds = THRESHOLDS
    if target is not None and target < bound:
        left = bound / target - 1.0
        thresholds = tuple(1.0 + left * part for part in TARGET_THRESHOLDS)
    ground = SearchSpace(
        problem.first_slot,
        problem.rank_of_slot,
        problem.node_of_rank,
        np.zeros(len(load), dtype=np.int64),
        1.0,
        0.0,
    )
    paths = []
    for threshold in thresholds:
        made = relieve(start[layer], load, ground, threshold * mean / bound, np.inf)
        balancedness = mean / made.busiest
        balancedness[0] = reached
        paths.append(LayerPath(changes=made.steps, moves=made.moves, balancedness=balancedness))
    return paths


def _standstill(reached: float) -> LayerPath:
    return LayerPath(
        changes=np.empty((0, 2), dtype=np.int64),
        moves=np.zeros(1, dtype=np.int64),
        balancedness=np.array([reached]),
    )


def _at_once(start: Slots, target: Slots, reached: tuple[float, float]) -> LayerPath:
    changed = np.flatnonzero(start != target)
    return LayerPath(
        changes=np.stack((changed, target[changed]), axis=1).astype(np.int64).reshape(1, -1),
        moves=np.array([0, len(changed)]),
        balancedness=np.array(reached),
    )


def _reach(paths: list[list[LayerPath]], busy: Bools, target: float | None) -> bool:
    best = [max(path.balancedness.max() for path in of_layer) for of_layer in paths]
    return target is not None and bool(busy.any() and np.array(best)[busy].mean() >= target)


def _improvement(
    problem: Problem,
    start: ExpertTable,
    paths: list[list[LayerPath]],
    ends: list[Point],
    curve: list[tuple[int, float]],
) -> Improvement:
    num_busy = max(int(problem.is_busy.sum()), 1)
    steps = [
        step
        for layer, end in enumerate(ends)
        for step in _steps(layer, start[layer], paths[layer][end.path], end, num_busy)
    ]
    steps.sort(key=lambda step: -step.gain / step.moves)
    ordered = [*_restoring(problem, start), *steps]
    table = problem.held.copy()
    for step in ordered:
        table[step.layer, step.slots] = step.experts
    return Improvement(table=table, steps=tuple(ordered), curve=tuple(curve))


def _restoring(problem: Problem, start: ExpertTable) -> Iterator[MoveStep]:
    """What brings back experts without a replica; worth any price."""
    for layer in np.flatnonzero(~problem.is_covered).tolist():
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
    """The stops worth making on the way to `end`."""
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

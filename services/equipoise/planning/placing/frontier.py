"""Which of many paths to follow, and how far, so that few moves buy much balance.

A `LayerPath` is one way to improve one layer, change by change. Over all layers the steepest
segments of the concave hulls go first: the Lagrangian solution of a knapsack whose items come in
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from equipoise.planning.load import Load

Slots = npt.NDArray[np.int32]
Change = tuple[npt.NDArray[np.int64], Slots]
"""Slots and the experts they take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPath:
    """Changes of one layer in order, and what is spent and reached before and after each.

    `moves`, int64 [changes + 1], counts the slots that differ from the start; `balancedness` is
    [changes + 1].
    """

    changes: Sequence[Change]
    moves: npt.NDArray[np.int64]
    balancedness: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place on a path: how many of its changes are made, the moves and the balancedness."""

    path: int
    num_changes: int
    moves: int
    balancedness: float


Hull = list[Point]
"""Points of growing moves and balancedness with falling slopes; the first is the start."""


def hull_of(paths: Sequence[LayerPath]) -> Hull:
    """The best of all paths of one layer, as a concave hull from their common start."""
    points = [
        Point(path=index, num_changes=count, moves=int(moves), balancedness=float(reached))
        for index, path in enumerate(paths)
        for count, (moves, reached) in enumerate(zip(path.moves, path.balancedness, strict=True))
        if count or not index
    ]
    return _concave(sorted(points, key=lambda point: (point.moves, -point.balancedness)))


def hull_along(path: LayerPath, *, num_changes: int) -> Hull:
    """The places on one path worth a stop on the way to a point of its layer's hull."""
    points = [
        Point(path=0, num_changes=count, moves=int(moves), balancedness=float(reached))
        for count, (moves, reached) in enumerate(zip(path.moves, path.balancedness, strict=True))
    ]
    end = points[num_changes]
    before = [
        point
        for point in points[:num_changes]
        if point.moves < end.moves and point.balancedness < end.balancedness
    ]
    return _concave([*before[:1], *_growing(before[1:]), end])


def take_steepest(
    hulls: Sequence[Hull],
    *,
    num_busy: int,
    start: float,
    target: float | None,
    max_moves: int | None,
) -> tuple[list[Point], list[tuple[int, float]]]:
    """Go up the hulls of all layers, most gain per move first; the point where each ends.

    Stops when the mean balancedness, `start` at first, over `num_busy` layers reaches `target`;
    leaves out what does not fit into `max_moves`. Also returns the whole curve, as if there were
    neither: moves and the mean balancedness that they buy.
    """
    taken = [hull[0] for hull in hulls]
    is_closed = [False] * len(hulls)
    moves, reached = 0, start
    total_moves, total = 0, start
    curve = [(0, start)]
    for _, layer, before, after in _steepest_first(hulls):
        gain = (after.balancedness - before.balancedness) / num_busy
        total_moves, total = total_moves + after.moves - before.moves, total + gain
        curve.append((total_moves, total))
        is_enough = target is not None and reached >= target
        too_many = max_moves is not None and moves + after.moves - before.moves > max_moves
        is_closed[layer] = is_closed[layer] or is_enough or too_many
        if not is_closed[layer]:
            taken[layer] = after
            moves, reached = moves + after.moves - before.moves, reached + gain
    return taken, curve


def _steepest_first(hulls: Sequence[Hull]) -> list[tuple[float, int, Point, Point]]:
    segments = [
        (slope(before, after), layer, before, after)
        for layer, hull in enumerate(hulls)
        for before, after in pairwise(hull)
    ]
    return sorted(segments, key=lambda segment: (-segment[0], segment[1]))


def slope(before: Point, after: Point) -> float:
    """Balancedness gained per move."""
    return (after.balancedness - before.balancedness) / (after.moves - before.moves)


def _growing(points: Sequence[Point]) -> list[Point]:
    """Leave out points that need no fewer moves than a later one: it overtakes them."""
    kept: list[Point] = []
    for point in points:
        while kept and kept[-1].moves >= point.moves:
            kept.pop()
        kept.append(point)
    return kept


def _concave(points: Sequence[Point]) -> Hull:
    """The upper hull of points in the order of their moves."""
    hull: Hull = []
    for point in points:
        if hull and (point.balancedness <= hull[-1].balancedness or point.moves <= hull[-1].moves):
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) <= slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull

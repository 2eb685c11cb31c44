"""Choose among many improvement paths, and how far to follow each, for the most balance per move.

A `LayerPath` is one way to improve one layer, change by change. Over all layers, the steepest
segments of the concave hulls go first: the Lagrangian solution of a knapsack with ordered items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from equipoise.planning.arrays import Indices, Load
from equipoise.planning.placing.compiled import compiled

ROUNDING = 1e-8
"""Balancedness that rounding may add; placements that have been settled have up to 1e-9 less."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPath:
    """Ordered changes of one layer, with moves and balancedness before and after each."""

    changes: Indices
    """int64 [changes, 2 x slots]: pairs of a slot and its new expert, padded with -1."""
    moves: Indices
    """int64 [changes + 1]: slots that differ from the start."""
    balancedness: Load
    """[changes + 1]."""

    def changed(self, begin: int, end: int) -> Indices:
        """List the slots and experts of the changes from `begin` to `end`, in order; [slots, 2]."""
        pairs = self.changes[begin:end].reshape(-1, 2)
        return pairs[pairs[:, 0] >= 0]

    def point(self, num_changes: int, *, path: int = 0) -> "Point":
        """Return the point after `num_changes` changes."""
        return Point(
            path=path,
            num_changes=num_changes,
            moves=int(self.moves[num_changes]),
            balancedness=float(self.balancedness[num_changes]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point on a path."""

    path: int
    """Index of the path among those of its layer."""
    num_changes: int
    """Changes of the path made so far."""
    moves: int
    balancedness: float


Hull = list[Point]
"""Points with increasing moves and balancedness and decreasing slopes; the first is the start."""


def hull_of(paths: Sequence[LayerPath]) -> Hull:
    """Combine all paths of one layer into a concave hull from their common start."""
    # The start counts once. Most points lie below the hull and never become `Point`s.
    first = [min(index, 1) for index in range(len(paths))]
    moves, reached, counts = (
        np.concatenate(parts)
        for parts in zip(
            *(
                (path.moves[skip:], path.balancedness[skip:], np.arange(skip, len(path.moves)))
                for path, skip in zip(paths, first, strict=True)
            ),
            strict=True,
        )
    )
    path_of = np.repeat(
        np.arange(len(paths)),
        [len(path.moves) - skip for path, skip in zip(paths, first, strict=True)],
    )
    order = np.lexsort((-reached, moves))
    highest_before = np.maximum.accumulate(np.append(-np.inf, reached[order][:-1]))
    better = order[reached[order] > highest_before + ROUNDING]
    chosen = better[_concave(moves[better], reached[better])]
    return [
        paths[path].point(count, path=path)
        for path, count in zip(path_of[chosen].tolist(), counts[chosen].tolist(), strict=True)
    ]


def hull_along(path: LayerPath, *, num_changes: int) -> Hull:
    """Select the points of one path worth a step on the way to a point of its layer's hull."""
    end = path.point(num_changes)
    is_below = (path.moves < end.moves) & (path.balancedness < end.balancedness)
    before = np.flatnonzero(is_below[:num_changes])
    stops = np.concatenate((before[:1], _growing(before[1:], path.moves), [num_changes]))
    chosen = stops[_concave(path.moves[stops], path.balancedness[stops])]
    return [path.point(stop) for stop in chosen.tolist()]


def take_steepest(
    hulls: Sequence[Hull],
    *,
    num_busy: int,
    start: float,
    target: float | None,
    max_moves: int | None,
    least_slope: float = 0.0,
) -> tuple[list[Point], list[tuple[int, float]]]:
    """Climb the hulls of all layers, most gain per move first.

    Stops when the mean balancedness over `num_busy` layers, initially `start`, reaches `target`, or
    a move gains less of it than `least_slope`; skips segments that do not fit into `max_moves`.

    Returns:
        the point where each layer ends, and the whole curve without any limit: (moves, mean
        balancedness).
    """
    taken = [hull[0] for hull in hulls]
    is_closed = [False] * len(hulls)
    moves, reached = 0, start
    total_moves, total = 0, start
    curve = [(0, start)]
    segments = [(layer, *ends) for layer, hull in enumerate(hulls) for ends in pairwise(hull)]
    for layer, before, after in sorted(segments, key=lambda one: (-slope(*one[1:]), one[0])):
        gain = (after.balancedness - before.balancedness) / num_busy
        total_moves, total = total_moves + after.moves - before.moves, total + gain
        curve.append((total_moves, total))
        is_enough = target is not None and reached >= target
        is_enough = is_enough or slope(before, after) / num_busy < least_slope
        too_many = max_moves is not None and moves + after.moves - before.moves > max_moves
        is_closed[layer] = is_closed[layer] or is_enough or too_many
        if not is_closed[layer]:
            taken[layer] = after
            moves, reached = moves + after.moves - before.moves, reached + gain
    return taken, curve


def slope(before: Point, after: Point) -> float:
    """Balancedness gained per move."""
    return (after.balancedness - before.balancedness) / (after.moves - before.moves)


def _growing(counts: Indices, moves: Indices) -> Indices:
    """Drop points that need at least as many moves as a later one."""
    needed = moves[counts]
    fewest_after = np.minimum.accumulate(np.append(needed[1:], np.iinfo(np.int64).max)[::-1])[::-1]
    return counts[needed < fewest_after]


@compiled
def _concave(moves: Indices, balancedness: Load) -> Indices:
    """Find the points on the upper hull of points ordered by moves, ascending."""
    hull, size = np.empty(len(moves), dtype=np.int64), 0
    for point in range(len(moves)):
        if size > 0:
            last = hull[size - 1]
            if balancedness[point] <= balancedness[last] or moves[point] <= moves[last]:
                continue
        while size > 1:
            first, last = hull[size - 2], hull[size - 1]
            rise, run = balancedness[last] - balancedness[first], moves[last] - moves[first]
            next_rise, next_run = (
                balancedness[point] - balancedness[last],
                moves[point] - moves[last],
            )
            if rise / run > next_rise / next_run:
                break
            size -= 1
        hull[size] = point
        size += 1
    return hull[:size]

"""An upper bound on the balancedness of any placement."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from equipoise.planning.arrays import Load, Weights
from equipoise.planning.placing.compiled import compiled, part

NUM_POINTS = 65
"""Numbers of slots for which `upper_bound_of_places` bounds each layer."""


def upper_bounds(load: Load, *, num_slots: int, num_ranks: int) -> Load:
    """Bound the balancedness of any placement, however experts are split; [layers], 1.0 if idle.

    `load` is [layers, experts]. If the busiest rank carries M, expert e needs at least
    ceil(load_e / M) replicas on different ranks, and all of them need slots. The smallest M for
    which they fit is a lower bound of the busiest rank; so is the mean. The bound ignores which
    replicas share a rank, so it is loose with few slots per rank.
    """
    return _upper_bounds(np.ascontiguousarray(load, dtype=np.float64), num_slots, num_ranks)


def upper_bound_of_places(load: Load, *, num_places: int, num_slots: int, num_ranks: int) -> float:
    """Bound the mean balancedness of any layout in which layers share places; 1.0 if idle.

    A relaxation: layers may have fractions of slots, up to `num_slots` each, and are as balanced as
    `upper_bounds` allows with them. The best division of places then climbs the upper convex hulls
    of the layers, steepest first. `load` is [layers, experts].
    """
    busy = load[load.any(axis=1)]
    num_experts = load.shape[1]
    numbers = np.unique(np.linspace(num_experts, num_slots, NUM_POINTS).astype(int)).tolist()
    of_number = np.array(
        [upper_bounds(busy, num_slots=number, num_ranks=num_ranks) for number in numbers]
    )
    # Between two numbers of slots, a layer is at most as balanced as with the larger one.
    slots = [num_experts, *(number + 1 for number in numbers[:-1])]
    left = float(num_places - num_experts * len(load))
    reached = float(of_number[0].sum())
    rises = sorted(
        (rise for layer in range(len(busy)) for rise in _rises(slots, of_number[:, layer])),
        key=lambda rise: -rise[0] / rise[1],
    )
    for height, width in rises:
        part = min(1.0, max(left, 0.0) / width)
        reached += part * height
        left -= part * width
    return min(reached / len(busy), 1.0) if len(busy) else 1.0


def _rises(slots: Sequence[int], bounds: Load) -> Iterator[tuple[float, int]]:
    """Yield the height and width of each segment of the upper convex hull, steepest first."""
    hull: list[tuple[int, float]] = []
    for x, y in zip(slots, bounds, strict=True):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        if not hull or y > hull[-1][1]:
            hull.append((x, y))
    for (x0, y0), (x1, y1) in pairwise(hull):
        yield y1 - y0, x1 - x0


@compiled
def _upper_bounds(load: Weights, num_slots: int, num_ranks: int) -> Weights:
    bounds = np.ones(len(load))
    for layer in range(len(load)):
        mean = load[layer].sum() / num_ranks
        if mean <= 0.0 or _fits(load[layer], mean, num_slots, num_ranks):
            continue
        too_low, high_enough = mean, max(mean, load[layer].max())
        for _ in range(30):
            middle = (too_low + high_enough) / 2
            if _fits(load[layer], middle, num_slots, num_ranks):
                high_enough = middle
            else:
                too_low = middle
        bounds[layer] = mean / too_low
    return bounds


@part
def _fits(load: Weights, busiest: float, num_slots: int, num_ranks: int) -> bool:
    needed = 0
    for expert in range(len(load)):
        # Slightly less than the quotient: rounding must not add a replica.
        replicas = int(np.ceil(load[expert] / busiest - 1e-9))
        if replicas > num_ranks:
            return False
        needed += max(1, replicas)
    return needed <= num_slots

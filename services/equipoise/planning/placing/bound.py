"""An upper bound on the balancedness of any placement."""

import numpy as np

from equipoise.planning.arrays import Load, Weights
from equipoise.planning.placing.compiled import compiled, part


def upper_bounds(load: Load, *, num_slots: int, num_ranks: int) -> Load:
    """Bound the balancedness of any placement, however experts are split; [layers], 1.0 if idle.

    `load` is [layers, experts]. If the busiest rank carries M, expert e needs at least
    ceil(load_e / M) replicas on different ranks, and all of them need slots. The smallest M for
    which they fit is a lower bound of the busiest rank; so is the mean. The bound ignores which
    replicas share a rank, so it is loose with few slots per rank.
    """
    return _upper_bounds(np.ascontiguousarray(load, dtype=np.float64), num_slots, num_ranks)


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

"""How much imbalance chance alone explains, so that no experts move because of sampling noise."""

import math

import numpy as np

from equipoise.planning.arrays import Bools, Load, Weights
from equipoise.planning.placing.problem import Problem
from equipoise.planning.shares import WHOLE
from equipoise.settings.numbers import format_number


def balancedness_by_chance(rank_load: Load) -> Load:
    """Compute how balanced layers with traffic at least look if all their ranks are evenly loaded.

    `rank_load` are counts, [layers, ranks], taken as Poisson. By Bernstein's inequality less than
    one of R ranks is expected to count more than m + sqrt(2 m ln R) + ln(R) / 3, where m is the
    mean.
    """
    mean: Load = rank_load.mean(axis=1)
    log = math.log(rank_load.shape[1])
    busiest: Load = mean + np.sqrt(2.0 * mean * log) + log / 3.0
    return mean / busiest


def chance_of_layer(problem: Problem, *, samples: float) -> Weights:
    """Compute how much of max / mean rank load chance explains, [layers].

    A plan fits the noise of the sample it is made for, while the placement in use fits an earlier
    sample. So the latter looks worse than it is by about the largest of R normal deviations of
    sqrt(2) sigma: sqrt(2) sigma sqrt(2 ln R). Here R is the number of ranks and sigma the relative
    standard deviation of a rank's load, with counts taken as Poisson.

    `samples` are assignments per layer in the load, averaged over the layers.
    """
    load, num_ranks = problem.load, problem.topology.num_ranks
    total = np.where(problem.is_busy, load.sum(axis=1), 1.0)
    variance = _variance_of_rank_loads(problem)
    # A count that a unit of load stands for; a layer that drafts counts fewer than the others.
    count = samples / max(float(load.sum(axis=1).mean()), 1e-300)
    sigma = np.sqrt(variance.max(axis=1) / count) / (total / num_ranks)
    chance: Weights = math.sqrt(2.0) * sigma * math.sqrt(2.0 * math.log(max(num_ranks, 2)))
    return chance


def gains_beyond_chance(problem: Problem, gain: Weights, *, samples: float) -> tuple[Bools, str]:
    """Find layers whose gain exceeds chance, [layers], and describe the comparison.

    If the mean gain over layers is below chance, single layers may still stand out. Each is
    compared with twice the largest deviation among the ranks of all layers, because a gain found
    after the largest of many deviations is likely to shrink by the same amount.

    Args:
        problem: the load and the placement in use.
        gain: the decrease of max / mean rank load under the plan, [layers].
        samples: assignments per layer in the load, averaged over the layers.
    """
    busy, num_ranks = problem.is_busy, problem.topology.num_ranks
    if not busy.any():
        return busy, "there is no traffic"
    chance = chance_of_layer(problem, samples=samples)
    num_cells = num_ranks * int(busy.sum())
    single = 2.0 * chance * math.sqrt(math.log(max(num_cells, 2)) / math.log(max(num_ranks, 2)))
    mean_gain, mean_chance = float(gain[busy].mean()), float(chance[busy].mean())
    beyond = busy & (gain > (chance if mean_gain > mean_chance else single))
    words = (
        f"a new plan would lower the busiest rank by {mean_gain:.2%} of the mean load, and "
        f"chance alone explains {mean_chance:.2%} with {format_number(samples)} assignments per "
        "layer"
    )
    return beyond, words


def _variance_of_rank_loads(problem: Problem) -> Weights:
    """Variance of rank loads, [layers, ranks]: a share s of a Poisson count n has s^2 n."""
    held, shares = problem.held, problem.held_shares
    if shares is None:
        of_replica = problem.load / np.maximum(problem.replicas(held), 1.0) ** 2
        variance = np.take_along_axis(of_replica, held, axis=1)
    else:
        variance = problem.slot_load(held, shares) * (shares / WHOLE)
    return np.add.reduceat(variance, problem.first_slot[:-1], axis=1)

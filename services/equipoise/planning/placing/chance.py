"""What chance does to a balance, so that nobody moves experts after noise."""

import math

import numpy as np

from equipoise.planning.arrays import Bools, Weights
from equipoise.planning.placing.problem import Problem
from equipoise.planning.placing.tally import sum_by_rank, sum_slots_by_rank
from equipoise.planning.shares import WHOLE


def gains_beyond_chance(problem: Problem, gain: Weights, *, samples: float) -> tuple[Bools, str]:
    """Layers whose gain chance does not explain, [layers], and the comparison in words.

    `gain` is how much a plan lowers max / mean rank load, [layers]. `samples` is the number of
    expert assignments per layer behind the load. A plan fits the noise of the sample it is made
    for, and the placement in use fits that of an earlier one, so the latter looks worse than it is
    by about the largest of R normal deviations of sqrt(2) sigma: sqrt(2) sigma sqrt(2 ln R), with
    sigma the relative standard deviation of a rank's load (counts are taken as Poisson).

    If the mean gain over layers is below that, only single layers may still stand out: each is
    compared with twice the largest deviation among the ranks of all layers, because of what a plan
    promises after the largest of many deviations, chance will take back as much.
    """
    load, busy = problem.load, problem.is_busy
    if not busy.any():
        return busy, "there is no traffic"
    num_ranks = problem.topology.num_ranks
    total = np.where(busy, load.sum(axis=1), 1.0)
    variance = _variance_of_rank_loads(problem)
    sigma = np.sqrt(variance.max(axis=1) * total / samples) / (total / num_ranks)
    chance = math.sqrt(2.0) * sigma * math.sqrt(2.0 * math.log(max(num_ranks, 2)))
    num_cells = num_ranks * int(busy.sum())
    single = 2.0 * math.sqrt(2.0) * sigma * math.sqrt(2.0 * math.log(max(num_cells, 2)))
    mean_gain, mean_chance = float(gain[busy].mean()), float(chance[busy].mean())
    beyond = busy & (gain > (chance if mean_gain > mean_chance else single))
    words = (
        f"a new plan would lower the busiest rank by {mean_gain:.2%} of the mean load, and "
        f"chance alone, with {samples:.3g} assignments a layer, explains {mean_chance:.2%}"
    )
    return beyond, words


def _variance_of_rank_loads(problem: Problem) -> Weights:
    """Of Poisson counts, [layers, ranks]: of n, a slot with the share s gets s n with s^2 n."""
    if problem.held_shares is not None:
        of_slot = problem.load_of_slot(problem.held, problem.held_shares)
        return sum_slots_by_rank(of_slot * (problem.held_shares / WHOLE), problem.first_slot)
    replicas = np.maximum(problem.replicas(problem.held), 1)
    of_replica = problem.load / replicas.astype(np.float64) ** 2
    return sum_by_rank(problem.held, of_replica, problem.rank_of_slot)

"""`find_slow`: which ranks compute slower than their peers, and not only more.

Ranks step together, so all their steps are equally long, and the slow one is seen by what the
others wait for it. Each tells how long it was busy itself: its steps without the time it waited in
exchanges. A busy rank may be overloaded, which is the planner's to mend; so what its load explains
is taken off before it is called slow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.policy import Policy

MIN_STEPS = 10
"""Steps that a window must have had, for medians of it to mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPace:
    """One window of a pool, by rank.

    `busy_us` is float64 [ranks], computing time a step, `load` [ranks] the assignments received.
    `steps` are those of the rank that told of fewest.
    """

    busy_us: Load
    load: Load
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that was slow in every window that counts, by the least of its factors."""

    rank: int
    factor: float
    reason: str


def slowdowns(pace: RankPace) -> Load | None:
    """How many times longer than the median rank each computes, [ranks], load taken off.

    A rank with twice the median load may take up to twice as long. The lower median is compared
    with, so that of two ranks the faster is the measure. None if the window says nothing.
    """
    if pace.steps < MIN_STEPS or (pace.busy_us <= 0).any():
        return None
    usual_us, usual_load = _lower_median(pace.busy_us), _lower_median(pace.load)
    excuse = np.maximum(1.0, pace.load / usual_load) if usual_load > 0 else 1.0
    factors: Load = pace.busy_us / usual_us / excuse
    return factors


def find_slow(paces: Sequence[RankPace], *, policy: Policy) -> Mapping[int, SlowRank]:
    """Ranks that were slow in each of the latest `policy.slow_worker_windows` windows.

    `paces` are of one epoch, oldest first; those that say nothing are passed over.
    """
    told = (factors for pace in reversed(paces) if (factors := slowdowns(pace)) is not None)
    latest = list(islice(told, policy.slow_worker_windows))
    if len(latest) < policy.slow_worker_windows:
        return {}
    least = np.min(latest, axis=0)
    return {
        int(rank): SlowRank(
            rank=int(rank),
            factor=float(least[rank]),
            reason=f"rank {rank} computes {least[rank]:.1f} times longer for a step than the "
            f"median rank, in {len(latest)} windows in a row",
        )
        for rank in np.flatnonzero(least >= policy.slow_worker_factor)
    }


def _lower_median(values: Load) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])

"""`find_slow`: which ranks compute slower than their peers, beyond what their load explains.

Ranks step together, so a slow rank shows only in how long the others wait for it. Each reports its
computing time: its steps without waits in exchanges. What its load explains is removed first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median_low

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.policy import Policy

MIN_STEPS = 10
"""Steps that a window needs for meaningful medians."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPace:
    """Computing time of the ranks of a pool in one window."""

    busy_us: Load
    """[ranks]: computing time per step, microseconds."""
    load: Load
    """[ranks]: assignments received."""
    steps: int
    """Fewest steps that a rank reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that was slow in every considered window."""

    rank: int
    factor: float
    """Smallest of its slowdowns."""
    reason: str


def slowdowns(pace: RankPace) -> Load | None:
    """Return how many times as long as the median rank each computes, corrected for load.

    A rank with twice the median load may take up to twice as long. Uses the lower median, so that
    of two ranks the faster one is the reference. None if the window has too few steps.
    """
    if pace.steps < MIN_STEPS or (pace.busy_us <= 0).any():
        return None
    usual_us, usual_load = median_low(pace.busy_us), median_low(pace.load)
    excuse = np.maximum(1.0, pace.load / usual_load) if usual_load > 0 else 1.0
    factors: Load = pace.busy_us / usual_us / excuse
    return factors


def find_slow(paces: Sequence[RankPace], *, policy: Policy) -> Mapping[int, SlowRank]:
    """Find ranks that were slow in each of the latest `policy.slow_worker_windows` windows.

    `paces` are those of one epoch, oldest first; windows with too few steps are skipped.
    """
    known = (factors for pace in reversed(paces) if (factors := slowdowns(pace)) is not None)
    latest = list(islice(known, policy.slow_worker_windows))
    if len(latest) < policy.slow_worker_windows:
        return {}
    least = np.min(latest, axis=0)
    return {
        int(rank): SlowRank(
            rank=int(rank),
            factor=float(least[rank]),
            reason=f"rank {rank} takes {least[rank]:.1f} times as long to compute a step as the "
            f"median rank, in {len(latest)} consecutive windows",
        )
        for rank in np.flatnonzero(least >= policy.slow_worker_factor)
    }

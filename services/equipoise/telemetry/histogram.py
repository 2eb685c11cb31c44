"""`Histogram`: counts of durations by bucket, without a global registry."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0)
"""Bucket bounds in seconds, for steps and tokens, up to an outage that requests survive."""

LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bucket bounds in seconds, for durations of several processes, up to the longest queue."""


class Histogram:
    """Counts of values up to each of `bounds`, which must ascend, and the sum of the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Count a finite value."""
        assert math.isfinite(value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative count for each bound, named as in Prometheus; the last bound is `+Inf`."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        totals = accumulate(self._counts)
        return [(name, float(total)) for name, total in zip(names, totals, strict=True)]

"""Sets of time as numpy arrays: sorted, disjoint, half-open intervals of int64 nanoseconds."""

from array import array
from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]

_PIECE = 2**19
"""Intervals that are intersected at once, which bounds the memory."""


class Intervals:
    """A set of time. Neither intervals of length 0 nor gaps of length 0 exist in it."""

    def __init__(self, starts: Times, ends: Times) -> None:
        """Take sorted, disjoint intervals; `of` takes any."""
        self.starts = starts
        self.ends = ends

    @classmethod
    def of(cls, starts: Times, ends: Times) -> Self:
        """The union of any intervals; those of length 0 add nothing."""
        if not (starts[1:] >= starts[:-1]).all():
            order = np.argsort(starts, kind="stable")
            starts, ends = starts[order], ends[order]
        # The latest end so far; a new interval begins where it is before the next start.
        reach = np.maximum.accumulate(ends)
        first = np.ones(len(starts), dtype=bool)
        first[1:] = starts[1:] > reach[:-1]
        last = np.append(first[1:], True)[: len(starts)]
        starts, ends = starts[first], reach[last]
        real = ends > starts
        return cls(starts[real], ends[real])

    @classmethod
    def union(cls, parts: Iterable["Intervals"]) -> Self:
        """The time in any of the parts."""
        listed = [part for part in parts if part]
        if len(listed) == 1:
            return cls(listed[0].starts, listed[0].ends)
        none = np.empty(0, dtype=np.int64)
        return cls.of(
            np.concatenate([none, *(part.starts for part in listed)]),
            np.concatenate([none, *(part.ends for part in listed)]),
        )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def total(self) -> int:
        """Nanoseconds in the set."""
        return int((self.ends - self.starts).sum())

    def __and__(self, other: "Intervals") -> "Intervals":
        """The time in both."""
        if not self or not other:
            return NEVER
        few, many = sorted((self, other), key=len)
        pieces = [
            _common(few, many.starts[at : at + _PIECE], many.ends[at : at + _PIECE])
            for at in range(0, len(many), _PIECE)
        ]
        starts, ends = (np.concatenate(one) for one in zip(*pieces, strict=True))
        return Intervals(starts, ends)

    def __sub__(self, other: "Intervals") -> "Intervals":
        """The time in this set only."""
        if not self or not other:
            return self
        limits = np.iinfo(np.int64)
        gaps = Intervals(
            np.concatenate([[limits.min], other.ends]), np.concatenate([other.starts, [limits.max]])
        )
        return self & gaps

    def before(self, times: Times) -> Times:
        """How much of the set is before each of the times, in nanoseconds."""
        if not self:
            return np.zeros(len(times), dtype=np.int64)
        lengths = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, times, side="right")
        within = np.minimum(times, self.ends[index - 1]) - self.starts[index - 1]
        passed: Times = lengths[np.maximum(index - 1, 0)] + np.where(index > 0, within, 0)
        return passed


NEVER = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def _common(few: Intervals, starts: Times, ends: Times) -> tuple[Times, Times]:
    """Pairs of overlapping intervals are found by search, and cut to what they share."""
    first = np.searchsorted(ends, few.starts, side="right")
    after = np.searchsorted(starts, few.ends, side="left")
    counts = after - first
    own = np.repeat(np.arange(len(few)), counts)
    theirs = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts) + first[own]
    return np.maximum(few.starts[own], starts[theirs]), np.minimum(few.ends[own], ends[theirs])


class Collector:
    """Collects intervals of one track; those that touch the latest one are merged at once."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")
        self.total = 0
        """Sum of the lengths of all intervals added, however they overlap, nanoseconds."""

    def add(self, start_ns: int, end_ns: int) -> int:
        """Add an interval; returns by how many the number of intervals held has grown."""
        self.total += end_ns - start_ns
        if self._starts and self._starts[-1] <= start_ns <= self._ends[-1]:
            self._ends[-1] = max(self._ends[-1], end_ns)
            return 0
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        return 1

    def __len__(self) -> int:
        return len(self._starts)

    def intervals(self) -> Intervals:
        """The union of what was added."""
        return Intervals.of(
            np.frombuffer(self._starts, dtype=np.int64), np.frombuffer(self._ends, dtype=np.int64)
        )

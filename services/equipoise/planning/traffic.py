"""`Traffic`: the kinds of traffic that recur in a pool, and what to expect of them.

A window belongs to the kind that it differs from by no more than noise; else it is a new kind. Each
kind has an average of its own, so traffic that alternates, comes in bursts or drifts back and forth
is known by what it consists of. A plan is made for the present kind while it stays, and for those
that may follow it, until the next plan answers them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median_low
from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import Load, Weights
from equipoise.planning.load import USUAL_WINDOWS, assignments_per_layer

MAX_KINDS = 8
"""Kinds that are kept; the two nearest become one when there are more."""

LEAST_DISTANCE = 0.03
"""Fraction of the load on other experts that always counts as the same kind: a plan for the
difference gains too little."""

MEMORY_S = 3600.0
"""Half-life of what is remembered about how often kinds come and how long they stay."""

WINDOWS_TO_RESPOND = 2
"""Windows that a layout serves traffic that it was not planned for: one shows the traffic, and one
passes while the next layout is planned and rolled out."""

ERROR_PART = 0.25
"""Part of the latest window in how far averages were from the windows."""

LEAST_DEPARTURES = 0.5
"""Departures, decayed, from which the length of a stay is known."""


class ShareAverage(NamedTuple):
    """A decayed average of fractions of each layer's load."""

    shares: Load
    """[layers, experts]; 0 in layers without traffic."""
    samples: float
    """Assignments per layer that it is as precise as."""

    def after(self, window: "ShareAverage", *, kept: float) -> "ShareAverage":
        """Average in a window; the past weighs `kept` times what it did.

        A window weighs by its assignments, but never less than the past forgets.
        """
        part = max(window.samples / (window.samples + kept * self.samples), 1.0 - kept)
        return ShareAverage(
            shares=self.shares + part * (window.shares - self.shares),
            samples=1.0 / (part**2 / window.samples + (1.0 - part) ** 2 / self.samples),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """One kind of traffic."""

    average: ShareAverage
    time_s: float = 0.0
    """Seconds of such traffic, decayed."""
    num_arrivals: float = 0.0
    """Times that it followed another kind, or came first; decayed."""
    num_departures: float = 0.0
    """Times that another kind followed it, decayed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedTraffic:
    """What traffic to expect until the next plan; the kind of the latest window comes first."""

    shares: Load
    """Fractions of each layer's load by kind, [kinds, layers, experts]."""
    weights: Weights
    """Fraction of the time that each kind is expected to take, [kinds]; sums to 1."""
    samples: float
    """Assignments per layer that the weighted mean of the kinds is as precise as."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Kinds of traffic seen so far; at most `MAX_KINDS`."""

    kinds: Sequence[Kind] = ()
    current: int = 0
    """Index of the kind of the latest window."""
    recent: ShareAverage | None = None
    """The latest windows of the present stay of the current kind; None before the first window."""
    errors: tuple[float, float] = (0.0, 0.0)
    """How far the average of the current kind and `recent` were from the latest windows."""
    distances: Sequence[float] = (0.0, 0.0)
    """How far the latest windows were from what was nearest. It takes three to be usual."""
    time_s: float = 0.0
    """Seconds of traffic, decayed."""
    num_switches: float = 0.0
    """Layouts that replaced another, decayed."""
    num_familiar: int = 0
    """Windows since the latest that was of a new kind."""

    def after(
        self,
        load: Load,
        *,
        duration_s: float,
        half_life_s: float,
        recent_half_life_s: float,
        factor: float,
    ) -> "Traffic":
        """Return the traffic after a window's load, [layers, experts] in assignments.

        The average of a kind forgets with `half_life_s` of its own time, the recent one with
        `recent_half_life_s`. A window further from all kinds than `factor` times noise is a new
        one. Noise is what chance explains, or if that is more, what most of the latest windows
        differed by.
        """
        if not assignments_per_layer(load):
            return self
        window = ShareAverage(_shares(load), assignments_per_layer(load))
        if self.recent is None or self.recent.shares.shape != load.shape:
            kind = Kind(average=window, time_s=duration_s, num_arrivals=1.0)
            return Traffic(kinds=(kind,), recent=window, time_s=duration_s)
        forgets = 2.0 ** (-duration_s / MEMORY_S)
        kinds = [_faded(kind, forgets) for kind in self.kinds]
        index, distance, chance = _nearest(kinds, window)
        usual = median_low(self.distances)
        nearest = min(distance, distance_between(window, self.recent))
        recent, errors = window, self.errors
        is_new = distance > max(factor * max(chance, usual), LEAST_DISTANCE)
        if is_new:
            index = len(kinds)
            kinds.append(Kind(average=window))
        else:
            average = kinds[index].average
            if index == self.current:
                of_kind, of_recent = distance, distance_between(window, self.recent)
                errors = (
                    errors[0] + ERROR_PART * (of_kind - errors[0]),
                    errors[1] + ERROR_PART * (of_recent - errors[1]),
                )
                recent = self.recent.after(window, kept=2.0 ** (-duration_s / recent_half_life_s))
            average = average.after(window, kept=2.0 ** (-duration_s / half_life_s))
            kinds[index] = replace(kinds[index], average=average)
        if index != self.current:
            left, come = kinds[self.current], kinds[index]
            kinds[self.current] = replace(left, num_departures=left.num_departures + 1.0)
            kinds[index] = replace(come, num_arrivals=come.num_arrivals + 1.0)
        kinds[index] = replace(kinds[index], time_s=kinds[index].time_s + duration_s)
        if len(kinds) > MAX_KINDS:
            kinds, index = _merged(kinds, index)
        return Traffic(
            kinds=tuple(kinds),
            current=index,
            recent=recent,
            errors=errors,
            distances=(*self.distances, nearest)[-USUAL_WINDOWS:],
            time_s=self.time_s * forgets + duration_s,
            num_switches=self.num_switches * forgets,
            num_familiar=0 if is_new else self.num_familiar + 1,
        )

    def switched(self) -> "Traffic":
        """Return the traffic after a layout replaced another."""
        return replace(self, num_switches=self.num_switches + 1.0)

    def layouts_last_s(self, most_s: float) -> float:
        """Seconds that layouts last in this pool; `most_s` until they are known to last less."""
        return min(most_s, (self.time_s + most_s) / (self.num_switches + 1.0))

    def expected(
        self, *, most_s: float, most_kinds: int, least_weight: float, window_s: float
    ) -> ExpectedTraffic:
        """Return what to expect while the present kind stays, and until its successor is answered.

        It stays for as long as it usually does, `most_s` at most and until it is known to leave.
        Others follow as often as they have come, and windows last `window_s`. The `most_kinds`
        likeliest count, if they take at least `least_weight` of the time.
        """
        kinds, current = self.kinds, self.kinds[self.current]
        weights = np.array([kind.num_arrivals for kind in kinds])
        weights[self.current] = 0.0
        if weights.any():
            weights *= WINDOWS_TO_RESPOND * window_s / weights.sum()
        weights[self.current] = min(max(self._stay_s(current, most_s), window_s), most_s)
        weights[self.current] = max(weights[self.current], 1e-3)
        weights /= weights.sum()
        order = np.argsort(-weights, kind="stable").tolist()
        order.remove(self.current)
        likely = [index for index in order if weights[index] > least_weight]
        order = [self.current, *likely[: most_kinds - 1]]
        weights = weights[order] / weights[order].sum()
        averages = [kinds[index].average for index in order]
        if self.recent is not None and self.errors[1] < self.errors[0]:
            averages[0] = self.recent
        samples = np.array([average.samples for average in averages])
        return ExpectedTraffic(
            shares=np.stack([average.shares for average in averages]),
            weights=weights,
            samples=float(1.0 / (weights**2 / samples).sum()),
        )

    def _stay_s(self, kind: Kind, unknown_s: float) -> float:
        """How long a kind stays, or any if it has not left yet; `unknown_s` if none has."""
        time_s, num_departures = kind.time_s, kind.num_departures
        if num_departures <= LEAST_DEPARTURES:
            time_s = sum(one.time_s for one in self.kinds)
            num_departures = sum(one.num_departures for one in self.kinds)
        return time_s / num_departures if num_departures > LEAST_DEPARTURES else unknown_s


def distance_between(one: ShareAverage, other: ShareAverage) -> float:
    """Fraction of the load that goes to other experts, averaged over layers."""
    return float(np.abs(one.shares - other.shares).sum(axis=1).mean() / 2.0)


def _shares(load: Load) -> Load:
    total = load.sum(axis=1, keepdims=True)
    shares: Load = load / np.where(total > 0, total, 1.0)
    return shares


def _faded(kind: Kind, forgets: float) -> Kind:
    return replace(
        kind,
        time_s=kind.time_s * forgets,
        num_arrivals=kind.num_arrivals * forgets,
        num_departures=kind.num_departures * forgets,
    )


def _nearest(kinds: Sequence[Kind], window: ShareAverage) -> tuple[int, float, float]:
    """Find the kind nearest to a window beyond chance; returns it, its distance, and chance."""
    found = []
    for index, kind in enumerate(kinds):
        distance = distance_between(window, kind.average)
        # Source of the bound: `detect_shift`. Both the window and the average are samples.
        mean = (window.shares + kind.average.shares) / 2.0
        spread = float(np.sqrt(mean * (1.0 - mean)).sum(axis=1).mean() / 2.0)
        chance = spread * math.sqrt(1.0 / window.samples + 1.0 / kind.average.samples)
        found.append((distance - chance, index, distance, chance))
    return min(found)[1:]


def _merged(kinds: list[Kind], current: int) -> tuple[list[Kind], int]:
    """Merge the two nearest kinds but the current one; returns where that is afterwards."""
    others = [index for index in range(len(kinds)) if index != current]
    pairs = [
        (distance_between(kinds[one].average, kinds[two].average), one, two)
        for one, two in combinations(others, 2)
    ]
    _, one, two = min(pairs)
    first, second = kinds[one], kinds[two]
    part = second.time_s / (first.time_s + second.time_s)
    shares = first.average.shares + part * (second.average.shares - first.average.shares)
    kinds[one] = Kind(
        average=ShareAverage(shares, first.average.samples + second.average.samples),
        time_s=first.time_s + second.time_s,
        num_arrivals=first.num_arrivals + second.num_arrivals,
        num_departures=first.num_departures + second.num_departures,
    )
    del kinds[two]
    return kinds, current - (current > two)

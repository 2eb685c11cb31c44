"""`Traffic`: the kinds of traffic that recur in a pool, and what to expect of them.

The load of a window belongs to the kind that it differs from by no more than noise; else it is a
new kind. Each kind has an average of its own, so traffic that alternates, comes in bursts or drifts
back and forth is known by what it consists of. A layout is then planned for the kinds that are
expected while it lasts: the present one for as long as it usually stays, then the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from equipoise.planning.arrays import Load, Weights
from equipoise.planning.load import assignments_per_layer

MAX_KINDS = 8
"""Kinds that are kept; the two nearest become one when there are more."""

LEAST_DISTANCE = 0.02
"""Fraction of the load on other experts that always counts as the same kind: planning for the
difference gains too little."""

LEAST_WEIGHT = 0.02
"""Expected fraction of time below which a kind is left out of a plan."""

MEMORY_S = 3600.0
"""Half-life of what is remembered about how often kinds come and how long they stay."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """One kind of traffic."""

    shares: Load
    """Average fractions of each layer's load, [layers, experts]; 0 in layers without traffic."""
    samples: float
    """Assignments per layer that the average is as precise as."""
    time_s: float
    """Seconds of such traffic, decayed."""
    num_stays: float
    """Completed stays, decayed."""

    def fold(self, shares: Load, samples: float, *, duration_s: float, kept: float) -> "Kind":
        """Return the kind after another window of it; the past weighs `kept` times what it did."""
        past = self.samples * kept
        part = samples / (past + samples)
        return replace(
            self,
            shares=self.shares + part * (shares - self.shares),
            samples=past + samples,
            time_s=self.time_s + duration_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedTraffic:
    """What traffic to expect over some time; the kind of the latest window comes first."""

    shares: Load
    """Fractions of each layer's load by kind, [kinds, layers, experts]."""
    weights: Weights
    """Fraction of the time that each kind is expected to take, [kinds]; sums to 1."""
    samples: float
    """Assignments per layer that the weighted mean of the kinds is as precise as."""

    def mean(self) -> Load:
        """Return the fractions of each layer's load over all the time, [layers, experts]."""
        mean: Load = (self.weights[:, None, None] * self.shares).sum(axis=0)
        return mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Kinds of traffic seen so far; at most `MAX_KINDS`."""

    kinds: Sequence[Kind] = field(default=())
    current: int = 0
    """Index of the kind of the latest window."""
    time_s: float = 0.0
    """Seconds of traffic, decayed."""
    num_switches: float = 0.0
    """Layouts that replaced another, decayed."""

    def after(
        self, load: Load, *, duration_s: float, half_life_s: float, factor: float
    ) -> "Traffic":
        """Return the traffic after a window's load, [layers, experts] in assignments.

        A kind's average forgets with `half_life_s` of its own time. `factor` is the multiple of
        chance by which windows of one kind differ at most.
        """
        samples = assignments_per_layer(load)
        if not samples:
            return self
        shares = _shares(load)
        forgets = 2.0 ** (-duration_s / MEMORY_S)
        kinds = [
            replace(kind, time_s=kind.time_s * forgets, num_stays=kind.num_stays * forgets)
            for kind in self.kinds
            if kind.shares.shape == load.shape
        ]
        index = _nearest(kinds, shares, samples, factor=factor)
        kept = 2.0 ** (-duration_s / half_life_s)
        if index is None:
            index = len(kinds)
            kinds.append(Kind(shares=shares, samples=samples, time_s=duration_s, num_stays=0.0))
        else:
            kinds[index] = kinds[index].fold(shares, samples, duration_s=duration_s, kept=kept)
        if self.current < len(self.kinds) and index != self.current and len(kinds) > 1:
            left = kinds[self.current]
            kinds[self.current] = replace(left, num_stays=left.num_stays + 1.0)
        if len(kinds) > MAX_KINDS:
            kinds, index = _merged(kinds, index)
        return Traffic(
            kinds=tuple(kinds),
            current=index,
            time_s=self.time_s * forgets + duration_s,
            num_switches=self.num_switches * forgets,
        )

    def knows(self, load: Load) -> bool:
        """Whether there is a kind of loads of this shape, [layers, experts]."""
        return any(kind.shares.shape == load.shape for kind in self.kinds)

    def switched(self) -> "Traffic":
        """Return the traffic after a layout replaced another."""
        return replace(self, num_switches=self.num_switches + 1.0)

    def layouts_last_s(self, most_s: float) -> float:
        """Seconds that layouts last in this pool; `most_s` until they are known to last less."""
        return min(most_s, (self.time_s + most_s) / (self.num_switches + 1.0))

    def expected(self, lasts_s: float) -> ExpectedTraffic:
        """Return what to expect over the next `lasts_s` seconds, once there is a kind.

        The present kind stays for a mean time that is learned, at a constant rate of leaving. The
        rest of the time falls to all kinds by how common they are.
        """
        lasts_s = max(lasts_s, 1e-3)
        kinds = self.kinds
        time_s = np.array([kind.time_s for kind in kinds])
        num_stays = np.array([kind.num_stays for kind in kinds])
        weights = np.zeros(len(kinds))
        if num_stays.sum() > 0.0:
            usual_s = time_s.sum() / num_stays.sum()
            stay_s = (time_s[self.current] + usual_s) / (num_stays[self.current] + 1.0)
            stays = stay_s / lasts_s * (1.0 - math.exp(-lasts_s / stay_s))
            weights = (1.0 - stays) * time_s / time_s.sum()
            weights[self.current] += stays
        else:
            weights[self.current] = 1.0
        order = [self.current, *(index for index in range(len(kinds)) if index != self.current)]
        order = [index for index in order if index == self.current or weights[index] > LEAST_WEIGHT]
        chosen = weights[order] / weights[order].sum()
        samples = np.array([kinds[index].samples for index in order])
        return ExpectedTraffic(
            shares=np.stack([kinds[index].shares for index in order]),
            weights=chosen,
            samples=float(1.0 / (chosen**2 / samples).sum()),
        )


def _shares(load: Load) -> Load:
    total = load.sum(axis=1, keepdims=True)
    shares: Load = load / np.where(total > 0, total, 1.0)
    return shares


def _nearest(kinds: Sequence[Kind], shares: Load, samples: float, *, factor: float) -> int | None:
    """Find the kind that a window belongs to."""
    best, index = math.inf, None
    for place, kind in enumerate(kinds):
        distance = _distance(shares, kind.shares)
        # Source of the bound: `detect_shift`. Both the window and the average are samples.
        spread = np.sqrt(kind.shares * (1.0 - kind.shares)).sum(axis=1).mean() / 2.0
        chance = float(spread) * math.sqrt(1.0 / samples + 1.0 / kind.samples)
        if distance <= max(factor * chance, LEAST_DISTANCE) and distance - chance < best:
            best, index = distance - chance, place
    return index


def _distance(one: Load, other: Load) -> float:
    """Fraction of the load that goes to other experts, averaged over layers."""
    return float(np.abs(one - other).sum(axis=1).mean() / 2.0)


def _merged(kinds: list[Kind], index: int) -> tuple[list[Kind], int]:
    """Merge the two nearest kinds; returns where the kind at `index` is afterwards."""
    pairs = [
        (_distance(kinds[one].shares, kinds[two].shares), one, two)
        for two in range(len(kinds))
        for one in range(two)
    ]
    _, one, two = min(pairs)
    first, second = kinds[one], kinds[two]
    total_s = first.time_s + second.time_s
    part = second.time_s / total_s
    kinds[one] = Kind(
        shares=first.shares + part * (second.shares - first.shares),
        samples=first.samples + second.samples,
        time_s=total_s,
        num_stays=first.num_stays + second.num_stays,
    )
    del kinds[two]
    if index == two:
        index = one
    return kinds, index - (index > two)

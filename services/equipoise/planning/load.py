"""Load windows and the moving averages that decisions are based on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import Indices, Load
from equipoise.planning.layout import Layout

MAX_LAYER_RATIO = 4.0
"""Largest ratio of a layer's assignments to the median layer's: all layers see the same tokens, up
to a step or two."""

MAX_LAYER_SURPLUS = 1000.0
"""Assignments by which a layer may always differ, because small counts are noisy."""

USUAL_WINDOWS = 8
"""Windows whose distances show how much the pool's traffic varies."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadDelta:
    """Assignments that one rank received between two of its reports."""

    rank: int
    layout: Layout
    slot_load: Load
    """[layers, slots_per_rank], for the rank's own slots in `layout`."""

    @property
    def expert_load(self) -> Load:
        """By logical expert, [layers, experts]."""
        slot_load = np.zeros((self.layout.num_layers, self.layout.num_slots))
        self.add_to(slot_load)
        return expert_load_of(slot_load, self.layout)

    def add_to(self, slot_load: Load) -> None:
        """Add it to a table of all slots, [layers, slots]."""
        first, last = self.layout.first_slot[self.rank : self.rank + 2]
        slot_load[:, first:last] += self.slot_load


class LoadWindow:
    """Assignments since the last close.

    Those of the newest generation are kept by slot and mapped to experts once, on close.
    """

    def __init__(
        self, *, num_layers: int, num_experts: int, num_ranks: int, opened_s: float
    ) -> None:
        self._expert_load = np.zeros((num_layers, num_experts))
        self._rank_load = np.zeros((num_layers, num_ranks))
        self._layout: Layout | None = None
        self._slot_load = np.zeros((num_layers, 0))
        self._num_generations = 0
        self._opened_s = opened_s

    def add(self, delta: LoadDelta) -> None:
        """Add the assignments that a rank received."""
        layout = delta.layout
        if self._layout is None or layout.generation > self._layout.generation:
            self._map_to_experts()
            self._layout = layout
            self._slot_load = np.zeros((layout.num_layers, layout.num_slots))
        if layout.generation == self._layout.generation:
            delta.add_to(self._slot_load)
        elif delta.slot_load.any():  # Late reports of an earlier generation.
            self._expert_load += delta.expert_load
            self._rank_load[:, delta.rank] += delta.slot_load.sum(axis=1)
            self._num_generations += 1

    def close(self, *, now: float) -> "WindowLoad":
        """Return the load since the last close, as counted; the next window opens `now`."""
        layout, slot_load = self._layout, self._slot_load
        is_newest_alone = self._map_to_experts() and self._num_generations == 1
        closed = WindowLoad(
            duration_s=max(0.0, now - self._opened_s),
            expert_load=self._expert_load,
            rank_load=self._rank_load,
            layout=layout if is_newest_alone else None,
            slot_load=slot_load,
        )
        self._expert_load = np.zeros_like(self._expert_load)
        self._rank_load = np.zeros_like(self._rank_load)
        self._slot_load = np.zeros_like(slot_load)
        self._num_generations = 0
        self._opened_s = now
        return closed

    def _map_to_experts(self) -> bool:
        """Map slot loads to experts and ranks; False if there are none."""
        layout = self._layout
        if layout is None or not self._slot_load.any():
            return False
        self._expert_load += expert_load_of(self._slot_load, layout)
        self._rank_load += np.add.reduceat(self._slot_load, layout.first_slot[:-1], axis=1)
        self._num_generations += 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowLoad:
    """The assignments of one closed window."""

    duration_s: float
    expert_load: Load
    """By logical expert, [layers, experts]."""
    rank_load: Load
    """By rank as measured, [layers, ranks]."""
    layout: Layout | None
    """The layout that ran; None if there were several."""
    slot_load: Load
    """By slot of `layout`, [layers, slots]."""

    @property
    def assignments_per_layer(self) -> float:
        """Assignments per layer, averaged over the layers."""
        return assignments_per_layer(self.expert_load)

    def at_common_steps(self, steps: Indices) -> "WindowLoad":
        """Return the load that the ranks would have counted in equally many steps.

        Ranks step together, but report at different moments: one whose reports were delayed, or
        that missed the window before, would look overloaded. `steps`, [ranks], are those that each
        rank reported in the window. The loads of a window with several layouts stay as counted.
        """
        if (steps <= 0).any():
            return self
        factor_of_rank = common_steps(steps) / steps
        rank_load = self.rank_load * factor_of_rank
        layout = self.layout
        if layout is None:
            return replace(self, rank_load=rank_load)
        slot_load = self.slot_load * np.repeat(factor_of_rank, layout.slots_of_rank)
        return replace(
            self,
            expert_load=expert_load_of(slot_load, layout),
            rank_load=rank_load,
            slot_load=slot_load,
        )

    @property
    def contradiction(self) -> str:
        """Why the counts cannot be correct; empty if they can.

        Every token passes every layer and goes to equally many experts of each, so all layers count
        the same. A rank that counts wrongly does not do so in all of them.
        """
        totals = self.expert_load.sum(axis=1)
        usual = median_low(totals)
        layer = int(totals.argmax())
        if totals[layer] <= MAX_LAYER_RATIO * usual + MAX_LAYER_SURPLUS:
            return ""
        rank = int(self.rank_load[layer].argmax())
        return (
            f"layer {layer} counted {totals[layer]:.0f} assignments, most of them on rank {rank}, "
            f"while half of the layers have at most {usual:.0f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadAverage:
    """An exponentially decayed average of assignments per second, [layers, experts].

    The fields are its whole state, so a store can keep them. After a restart the caller must rebase
    `folded_s` onto its own clock.

    An assignment t seconds old weighs 2^(-t / half_life_s). Those of a fold are assumed to arrive
    evenly since the fold before, so a steady stream gives the same average however its time is cut
    into folds. The sum is divided by the decayed time, not by its limit, so the average of a steady
    stream is exact from the start.

    It also keeps the mean square of the folds' rates, which shows how much an expert's load varies
    between folds. A store may omit it: the load then counts as steady so far.
    """

    half_life_s: float
    folded_s: float
    """Time of the last fold."""
    decayed_load: Load
    """Decayed sum of assignments, [layers, experts]."""
    decayed_duration_s: float
    """Decayed sum of seconds."""
    decayed_squares: Load | None = None
    """Decayed sum of squared rates times seconds, [layers, experts]; None if unknown."""

    @classmethod
    def start(
        cls, *, num_layers: int, num_experts: int, half_life_s: float, now: float
    ) -> "LoadAverage":
        """Return an empty average."""
        return cls(
            half_life_s=half_life_s,
            folded_s=now,
            decayed_load=np.zeros((num_layers, num_experts)),
            decayed_duration_s=0.0,
        )

    def fold(self, load: Load, *, now: float) -> "LoadAverage":
        """Return the average after `load`, [layers, experts], arrived since the last fold."""
        elapsed_s = max(0.0, now - self.folded_s)
        kept = 2.0 ** (-elapsed_s / self.half_life_s)
        # The integral of 2^(-t / half_life_s) over the elapsed time: its decayed length.
        duration_s = (1.0 - kept) * self.half_life_s / math.log(2.0)
        weight = duration_s / elapsed_s if elapsed_s > 0.0 else 1.0
        rate = load / elapsed_s if elapsed_s > 0.0 else np.zeros_like(load)
        return replace(
            self,
            folded_s=max(now, self.folded_s),
            decayed_load=kept * self.decayed_load + weight * load,
            decayed_duration_s=kept * self.decayed_duration_s + duration_s,
            decayed_squares=kept * self._squares() + duration_s * rate**2,
        )

    def skipped(self, *, now: float) -> "LoadAverage":
        """Return the same average at `now`, for a time in which the load is unknown."""
        return replace(self, folded_s=max(now, self.folded_s))

    def restarted(self, load: Load, *, duration_s: float, now: float) -> "LoadAverage":
        """Return an average of `load` in the last `duration_s` only; earlier load is dropped."""
        empty = replace(
            self,
            folded_s=now - duration_s,
            decayed_load=np.zeros_like(self.decayed_load),
            decayed_duration_s=0.0,
            decayed_squares=None,
        )
        return empty.fold(load, now=now)

    def per_second(self) -> Load:
        """Return assignments per second, [layers, experts]; zeros before time has passed."""
        if self.decayed_duration_s <= 0.0:
            return np.zeros_like(self.decayed_load)
        return self.decayed_load / self.decayed_duration_s

    def samples(self) -> float:
        """Return how many equally weighted assignments per layer estimate the load as precisely.

        An assignment of weight w adds w to the sum and w^2 to its variance, so there are
        (sum of w)^2 / (sum of w^2) of them (L. Kish, 1965). In a steady stream over which the
        weight fell from 1 to k that is 2 / (1 + k) times the decayed sum: all assignments of a
        young average, and those of 2.9 half-lives of an old one.
        """
        least_weight = max(0.0, 1.0 - self.decayed_duration_s * math.log(2.0) / self.half_life_s)
        return assignments_per_layer(self.decayed_load) * 2.0 / (1.0 + least_weight)

    def variance(self) -> Load:
        """Return the variance over folds of assignments per second; 0 if unknown.

        Includes the sampling noise of a fold, so it does not fall to 0 in practice.
        """
        if self.decayed_duration_s <= 0.0:
            return np.zeros_like(self.decayed_load)
        mean_square = self._squares() / self.decayed_duration_s
        return np.maximum(mean_square - self.per_second() ** 2, 0.0)

    def at_risk(self, z: float) -> Load:
        """Return assignments per second `z` standard deviations above the mean.

        For plans that leave room for bursts: ranks of equal mean load may vary very differently.
        """
        return self.per_second() + z * np.sqrt(self.variance())

    def _squares(self) -> Load:
        if self.decayed_squares is not None:
            return self.decayed_squares
        return self.per_second() ** 2 * self.decayed_duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Whether traffic shifted to other experts."""

    detected: bool
    distance: float
    """Fraction of the load that goes to other experts than before, 0 to 1."""
    noise: float
    """Fraction that chance alone explains, or that is usual for the pool if that is more."""
    reason: str


def detect_shift(
    fast: Load, slow: Load, *, assignments: float, factor: float, usual: float = 0.0
) -> Shift:
    """Compare the recent load with the longer average, both [layers, experts] in any unit.

    The distance of a layer is the total variation between its normalised rows p (slow) and
    q (fast), sum |p - q| / 2. If q were n samples of p, then for each expert
    E|q - p| <= sqrt(p (1 - p) / n), so the mean distance by chance is at most
    sum sqrt(p (1 - p) / n) / 2, where n is the layer's part of `assignments`, the average per layer
    in `fast`. Both are averaged over the layers with traffic in both. It is a shift if the distance
    exceeds `factor` times the noise: this bound, or `usual`, the distance of most windows, if that
    is more.
    """
    both = (fast.sum(axis=1) > 0) & (slow.sum(axis=1) > 0)
    if assignments <= 0 or not both.any():
        return Shift(detected=False, distance=0.0, noise=0.0, reason="no shift: no traffic yet")
    recent = _shares(fast[both])
    longer = _shares(slow[both])
    # The mixture of both, because experts new to `slow` are noisy too.
    expected = (recent + longer) / 2
    distance = float(np.abs(recent - longer).sum(axis=1).mean() / 2)
    # A layer that drafts counts fewer than the others.
    counted = assignments * fast[both].sum(axis=1, keepdims=True) / assignments_per_layer(fast)
    chance = float(np.sqrt(expected * (1 - expected) / counted).sum(axis=1).mean() / 2)
    noise = max(chance, usual)
    detected = distance > factor * noise
    source = "is usual in this pool" if usual > chance else "is explained by chance"
    return Shift(
        detected=detected,
        distance=distance,
        noise=noise,
        reason=(
            f"{'shift' if detected else 'no shift'}: {distance:.1%} of the load has moved to other "
            f"experts; {noise:.1%} {source}, and a shift needs {factor:g} times that"
        ),
    )


class FollowedTraffic(NamedTuple):
    """Both averages after a window, and whether its traffic shifted."""

    fast: LoadAverage
    slow: LoadAverage
    shifts: Sequence[Shift]
    """What was found in the latest windows with traffic, oldest first; the window is the last."""
    shift: Shift
    """What was found in the window."""


def follow_traffic(
    fast: LoadAverage,
    slow: LoadAverage,
    load: Load,
    *,
    before: Sequence[Shift],
    duration_s: float,
    factor: float,
    now: float,
) -> FollowedTraffic:
    """Fold a window's load, [layers, experts], into both averages; restart them if traffic shifted.

    Otherwise they would take half-lives to follow, and each of these windows would count as a shift
    of its own. A shift falls somewhere inside a window, so that window is a mixture. The next one
    is the first without old traffic, so the averages restart from it once more.

    Requests are not independent samples, so traffic varies by more than chance from window to
    window, and some alternates. What is usual is therefore the median distance of the windows
    `before`. If most windows differ, none is a shift, and the averages become those of the mixture.
    """
    fast, slow = fast.fold(load, now=now), slow.fold(load, now=now)
    assignments = assignments_per_layer(load)
    shift = detect_shift(
        fast.per_second(),
        slow.per_second(),
        assignments=assignments,
        usual=median_low(one.distance for one in before) if before else 0.0,
        factor=factor,
    )
    if not assignments:  # This says nothing about where traffic goes.
        return FollowedTraffic(fast, slow, before, shift)
    if shift.detected or (before and before[-1].detected):
        fast, slow = (
            average.restarted(load, duration_s=duration_s, now=now) for average in (fast, slow)
        )
    return FollowedTraffic(fast, slow, (*before, shift)[-USUAL_WINDOWS:], shift)


def common_steps(steps: Indices) -> int:
    """Return the steps that most ranks made in a window: the median, unmoved by a few ranks."""
    return int(np.sort(steps)[(len(steps) - 1) // 2])


def expert_load_of(slot_load: Load, layout: Layout) -> Load:
    """Sum the loads of slots, [layers, slots], by expert, [layers, experts]."""
    shape = (layout.num_layers, layout.num_experts)
    # An empty slot has no load, so any expert will do for it.
    experts = np.maximum(layout.expert_of_slot, 0)
    cells = experts + np.arange(layout.num_layers)[:, None] * layout.num_experts
    load = np.bincount(cells.ravel(), slot_load.ravel(), minlength=math.prod(shape))
    return load.astype(np.float64, copy=False).reshape(shape)


def assignments_per_layer(load: Load) -> float:
    """Average the assignments over the layers."""
    return float(load.sum(axis=1).mean())


def _shares(load: Load) -> Load:
    shares: Load = load / load.sum(axis=1, keepdims=True)
    return shares

"""`StepCostFit`: what a step's time consists of, fitted to a pool's windows.

Model: step time = fixed + per assignment x assignments of the busiest rank + per row x assignments
of a rank on average, all per step and summed over layers. The second part are the experts: all
ranks wait for the busiest. The third is what grows with tokens however they are placed: mostly the
exchange, in which each assignment is a row.

A window gives two equations: its step time, and how much longer ranks with more load compute. The
second one shows the cost of an assignment even if traffic and layout never change. Windows with
stalls are outliers, so the fit is robust: least absolute deviations first, then Tukey's biweight
(Beaton and Tukey, 1974) around it. If the latest windows all contradict it, the constants have
changed, and it begins again with them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.planning.arrays import Load
from equipoise.planning.slowness import MIN_STEPS
from equipoise.settings.numbers import format_number

Array = npt.NDArray[np.float64]

MIN_WINDOWS = 8
"""Windows before anything is fitted."""

MAX_WINDOWS = 64
"""The latest windows that are fitted, because hardware and models change."""

MIN_RANKS_TO_COMPARE = 3
"""Of two ranks, a slow one cannot be told from a loaded one."""

MAX_RANKS_TO_COMPARE = 64
"""Ranks whose pairs are compared; of more, an even selection by load."""

_CUTOFF = 4.685  # of Tukey's biweight, in standard deviations: 95 % efficient on normal noise
_ROUNDS = 30
_CONVERGED = 1e-5
_TINY = 1e-9
_RIDGE = 1e-11
_SINGULAR = 1e-8  # Relative to the best known combination of constants.
_LEAST_SPREAD = 0.5
_KNOWN_BY = 2.0
_MOST = 1e18
_CHANGED_BY = 4.0  # Standard deviations, and at least this part of a step:
_LEAST_CHANGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Means over the steps of one window.

    Raises:
        ValueError: a value is not from 0 to 1e18, or a gap in time not from -1e18 to 1e18.
    """

    step_s: float
    """Duration of a step."""
    max_rank_load: float
    """Assignments of the busiest rank per step: the maximum of each layer, summed over layers."""
    mean_rank_load: float
    """Assignments of a rank per step on average, summed over layers."""
    num_steps: int = 1
    """Steps of the window."""
    load_gap: float = 0.0
    """Assignments per step by which the most loaded rank exceeds the least loaded, over all layers;
    0 if computing times are not compared."""
    busy_gap_s: float = 0.0
    """Computing time per step that such a gap takes, by the median over all pairs of ranks."""

    def __post_init__(self) -> None:
        values = (self.step_s, self.max_rank_load, self.mean_rank_load, self.load_gap)
        if not all(0 <= value <= _MOST for value in values):
            raise ValueError(f"a window's means must be from 0 to {_MOST:g}, not {values}")
        if not abs(self.busy_gap_s) <= _MOST or self.num_steps < 1:
            raise ValueError(f"a window needs steps, and a gap of at most {_MOST:g} s, not {self}")


def compare_ranks(load: Load, busy_s: Load) -> tuple[float, float]:
    """Return `load_gap` and `busy_gap_s` of a window, given each rank's load and computing time.

    Both are [ranks], per step. The gap in time is the gap in load times the median slope over all
    pairs of ranks, each counted by its difference in load (Sen, 1968), so that a few slow ranks do
    not matter. Zeros if the ranks are too few or equally loaded.
    """
    if len(load) < MIN_RANKS_TO_COMPARE or load.max() <= load.min():
        return 0.0, 0.0
    order = np.argsort(load, kind="stable")
    if len(order) > MAX_RANKS_TO_COMPARE:
        picked = np.linspace(0, len(order) - 1, MAX_RANKS_TO_COMPARE).round().astype(np.int64)
        order = order[picked]
    less, more = np.triu_indices(len(order), k=1)
    loads, times = load[order], busy_s[order]
    differences = loads[more] - loads[less]
    differs = differences > 0
    differences = differences[differs]
    slopes = (times[more] - times[less])[differs] / differences
    by_slope = np.argsort(slopes, kind="stable")
    reached = np.cumsum(differences[by_slope])
    slope = float(slopes[by_slope[int(np.searchsorted(reached, reached[-1] / 2))]])
    gap = float(load.max() - load.min())
    return gap, slope * gap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The constants of the model, each at least 0, with their standard errors."""

    num_windows: int
    """Windows that were fitted."""
    fixed_s: float
    """Seconds of a step without assignments."""
    fixed_error_s: float
    """Its standard error."""
    per_assignment_s: float
    """Seconds of an assignment on the busiest rank."""
    per_assignment_error_s: float
    """Its standard error."""
    per_row_s: float
    """Seconds of an assignment of a rank on average, wherever it runs."""
    per_row_error_s: float
    """Its standard error."""
    spread: float
    """Standard deviation of a window's step time around the model, as a fraction of it, without
    outliers."""

    @property
    def is_known(self) -> bool:
        """Whether the cost of an assignment is significant: clearly above its standard error."""
        return self.per_assignment_s > _KNOWN_BY * self.per_assignment_error_s

    @property
    def reason(self) -> str:
        """Why the cost is known or not."""
        cost, error = self.per_assignment_s * 1e6, self.per_assignment_error_s * 1e6
        measured = f"{format_number(cost)} ± {format_number(error, digits=2)} µs per assignment"
        if self.is_known:
            return f"{self.num_windows} windows: {measured}"
        why = "loads have varied too little, or ranks' computing times contradict step times"
        found = "" if error > cost else f" ({measured})"
        return f"{self.num_windows} windows leave the cost uncertain{found}: {why}"

    def step_s(self, *, max_rank_load: float, mean_rank_load: float) -> float:
        """Predict the duration of a step."""
        experts_s = self.per_assignment_s * max_rank_load
        return self.fixed_s + experts_s + self.per_row_s * mean_rank_load


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """What imbalance costs in one window."""

    step_s: float | None
    """Duration of a step in seconds; None if unknown."""
    cost_s: float | None
    """Seconds of it that evenly loaded ranks would save; None if the duration is unknown."""
    error_s: float | None
    """Standard error of `cost_s`; None for an upper bound."""
    share: float
    """Fraction of a step that evenly loaded ranks would save."""
    expert_share: float | None
    """Fraction of a step of evenly loaded ranks that they would spend in experts; None for an upper
    bound."""
    is_measured: bool
    """False for an upper bound, as if a step consisted only of expert computation."""
    reason: str
    """What it is based on."""


def imbalance(
    window: StepWindow | None, cost: StepCost | None, *, balancedness: float, num_windows: int
) -> Imbalance:
    """Compute what imbalance costs in a window: an upper bound if an assignment's cost is unknown.

    `balancedness` is that of the window, for pools that do not report step times; `num_windows`
    are those collected so far.
    """
    step_s = 0.0 if window is None else window.step_s
    if window is not None and window.max_rank_load > 0:
        balancedness = window.mean_rank_load / window.max_rank_load
    if window is None or cost is None or not (cost.is_known and step_s):
        share = 1.0 - balancedness
        return Imbalance(
            step_s=step_s or None,
            cost_s=share * step_s if step_s else None,
            error_s=None,
            share=share,
            expert_share=None,
            is_measured=False,
            reason=unknown_cost(cost, num_windows=num_windows),
        )
    excess = window.max_rank_load - window.mean_rank_load
    # Experts take at most the whole step, whatever the fit says.
    cost_s = min(cost.per_assignment_s * excess, step_s * (1.0 - balancedness))
    experts_s = cost.per_assignment_s * window.mean_rank_load
    return Imbalance(
        step_s=step_s,
        cost_s=cost_s,
        error_s=cost.per_assignment_error_s * excess,
        share=cost_s / step_s,
        expert_share=min(1.0, experts_s / (step_s - cost_s)),
        is_measured=True,
        reason=cost.reason,
    )


def unknown_cost(cost: StepCost | None, *, num_windows: int) -> str:
    """Why the cost of an assignment is not known, or not applicable to the latest window."""
    if cost is not None and cost.is_known:
        return f"the latest window has fewer than {MIN_STEPS} steps of a rank"
    if cost is not None:
        return cost.reason
    return (
        f"a measurement needs {MIN_WINDOWS} windows with the times of {MIN_STEPS} steps of each "
        f"rank and no switch; so far {num_windows}"
    )


class StepCostFit:
    """Collects windows and fits them; deterministic."""

    def __init__(self) -> None:
        self._windows: deque[StepWindow] = deque(maxlen=MAX_WINDOWS)
        self._fitted: StepCost | None = None
        self._is_fitted = True

    @property
    def num_windows(self) -> int:
        """Windows that it holds."""
        return len(self._windows)

    def add(self, window: StepWindow) -> None:
        """Take one more window; the oldest is dropped once there are `MAX_WINDOWS`."""
        self._windows.append(window)
        self._is_fitted = False

    def clear(self) -> None:
        """Forget all windows."""
        self._windows.clear()
        self._is_fitted = False

    def cost(self) -> StepCost | None:
        """Fit the windows, once after each change; None with fewer than `MIN_WINDOWS`.

        Windows from before the constants changed are dropped.
        """
        if not self._is_fitted:
            enough = len(self._windows) >= MIN_WINDOWS
            self._fitted = _cost_of(self._windows) if enough else None
            if self._fitted is not None and _has_changed(self._fitted, self._latest):
                self._windows = deque(self._latest, maxlen=MAX_WINDOWS)
                self._fitted = _cost_of(self._windows)
            self._is_fitted = True
        return self._fitted

    @property
    def _latest(self) -> Sequence[StepWindow]:
        return tuple(self._windows)[-MIN_WINDOWS:]


def _has_changed(cost: StepCost, latest: Sequence[StepWindow]) -> bool:
    """Whether the latest windows all contradict a fit, as outliers do."""
    least = max(_CHANGED_BY * cost.spread, _LEAST_CHANGE)
    for one in latest:
        predicted_s = cost.step_s(
            max_rank_load=one.max_rank_load, mean_rank_load=one.mean_rank_load
        )
        if abs(predicted_s - one.step_s) <= least * one.step_s:
            return False
    return True


def _cost_of(windows: Sequence[StepWindow]) -> StepCost:
    design, sums = _equations(windows)
    # Columns of like size, so that one measure of singularity serves all.
    scale = np.maximum(np.abs(design).mean(axis=0), _TINY)
    design = design / scale
    constants, errors, spread = _fitted(design, sums, num_steps=len(windows))
    errors[1] = np.hypot(errors[1], _contradiction(design, sums, num_steps=len(windows)))
    constants, errors = constants / scale, errors / scale
    return StepCost(
        num_windows=len(windows),
        fixed_s=float(constants[0]),
        fixed_error_s=float(errors[0]),
        per_assignment_s=float(constants[1]),
        per_assignment_error_s=float(errors[1]),
        per_row_s=float(constants[2]),
        per_row_error_s=float(errors[2]),
        spread=spread,
    )


def _equations(windows: Sequence[StepWindow]) -> tuple[Array, Array]:
    """Return what constants are multiplied by, [equations, 3], and their sums, [equations].

    The first ones are about step times, in units of each, because longer steps vary more; the
    others about gaps, in units of the usual step.
    """
    steps = np.array([(1.0, one.max_rank_load, one.mean_rank_load, one.step_s) for one in windows])
    gaps = [(0.0, one.load_gap, 0.0, one.busy_gap_s) for one in windows if one.load_gap > 0]
    equations = steps / np.maximum(steps[:, 3:], _TINY)
    if gaps:
        equations = np.vstack((equations, np.array(gaps) / max(np.median(steps[:, 3]), _TINY)))
    return equations[:, :3], equations[:, 3]


def _contradiction(design: Array, sums: Array, *, num_steps: int) -> float:
    """How much more an assignment costs by step times than by comparing ranks, or less.

    0 if that may be chance: then both are right.
    """
    if len(design) - num_steps < MIN_WINDOWS:
        return 0.0
    by_steps, steps_errors, _ = _fitted(design[:num_steps], sums[:num_steps], num_steps=num_steps)
    gaps, gaps_s = design[num_steps:, 1:2], sums[num_steps:]
    by_gaps, gaps_errors, _ = _fitted(gaps, gaps_s, num_steps=len(gaps))
    differs = abs(float(by_steps[1] - by_gaps[0]))
    return differs if differs > _KNOWN_BY * np.hypot(steps_errors[1], gaps_errors[0]) else 0.0


def _fitted(design: Array, sums: Array, *, num_steps: int) -> tuple[Array, Array, float]:
    """Constants of at least 0, their standard errors, and the spread of step times as a fraction.

    The first `num_steps` equations are about step times, the others about gaps.
    """
    free = np.ones(design.shape[1], dtype=bool)
    while True:
        constants = np.zeros(len(free))
        constants[free], weights, noise = _robust(design[:, free], sums, num_steps=num_steps)
        if (constants >= 0).all() or free.sum() == 1:
            break
        # No part of a step takes negative time: leave the most negative one out.
        free[int(np.argmin(constants))] = False
    constants = np.maximum(constants, 0.0)
    if weights.sum() < len(free):
        weights = np.ones(len(sums))  # All are outliers: no constants explain the windows.
    residuals = (sums - design @ constants) / noise
    degrees = max(1.0, float(weights.sum()) - int(free.sum()))
    # Noise has a lower bound, which residuals may be below.
    spread = max(float(np.sqrt((weights * residuals**2).sum() / degrees)), _LEAST_SPREAD)
    # All columns take part, so that a constant that was left out has an error too. A combination
    # of constants that the windows do not show at all has a large error, not none.
    _, sizes, directions = np.linalg.svd(
        np.sqrt(weights)[:, None] * design / noise[:, None], full_matrices=False
    )
    sizes = np.maximum(sizes, _SINGULAR * max(sizes[0], _TINY))
    errors = _student(degrees) * spread * np.sqrt(((directions / sizes[:, None]) ** 2).sum(axis=0))
    return constants, errors, spread * float(noise[0])


def _student(degrees: float) -> float:
    """How much wider the middle 95 % of Student's distribution are than those of a normal one.

    Its first terms by Cornish and Fisher (1938).
    """
    return 1.0 + 1.21 / degrees + 1.44 / degrees**2


def _robust(design: Array, sums: Array, *, num_steps: int) -> tuple[Array, Array, Array]:
    """Constants by biweight from least absolute deviations.

    Also returns the equations' weights, 0 to 1, and their noise: that of their kind.
    """
    floor = max(_TINY, 1e-6 * float(np.median(np.abs(sums))))
    constants = _weighted(design, sums, np.ones(len(sums)))
    for _ in range(_ROUNDS):
        before, away = constants, np.abs(sums - design @ constants)
        constants = _weighted(design, sums, 1 / np.maximum(away, floor))
        if _has_converged(before, constants):
            break
    away = np.abs(sums - design @ constants)
    noise = np.empty_like(sums)
    for kind in (slice(None, num_steps), slice(num_steps, None)):
        noise[kind] = max(floor, _deviation(away[kind], num_constants=design.shape[1]))
    design, sums = design / noise[:, None], sums / noise
    weights = np.ones(len(sums))
    for _ in range(_ROUNDS):
        ratio = np.abs(sums - design @ constants) / _CUTOFF
        weights = np.where(ratio < 1, (1 - np.minimum(ratio, 1) ** 2) ** 2, 0.0)
        before, constants = constants, _weighted(design, sums, weights)
        if _has_converged(before, constants):
            break
    return constants, weights, noise


def _deviation(away: Array, *, num_constants: int) -> float:
    """Standard deviation of normal noise by its median, without the degrees of freedom."""
    if not len(away):
        return 0.0
    return 1.4826 * float(np.sort(away)[min(len(away) - 1, (len(away) + num_constants) // 2)])


def _has_converged(before: Array, after: Array) -> bool:
    return bool(np.abs(after - before).max() <= _CONVERGED * np.abs(after).max())


def _weighted(design: Array, sums: Array, weights: Array) -> Array:
    """Constants of least weighted squares; small ones where the windows do not tell them apart."""
    weighted = design.T * weights
    normal = weighted @ design
    # Rounding makes a singular matrix slightly indefinite; this is far below any noise.
    normal.flat[:: len(normal) + 1] += _RIDGE * normal.trace()
    return np.linalg.solve(normal, weighted @ sums).astype(np.float64, copy=False)

"""`StepCounters`: the steps that ranks reported, and the time they took and computed.

Ranks step together, so their step counts make the loads of ranks that report at different moments
comparable. Like assignments, step counts are cumulative; a report of them may be lost, late,
repeated or false.
"""

import numpy as np

from equipoise.planning.arrays import Indices, Load
from equipoise.planning.counters import LoadReport
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.load import common_steps
from equipoise.planning.phase import Phase
from equipoise.planning.slowness import MIN_STEPS, RankPace
from equipoise.planning.step_cost import StepWindow, compare_ranks

MAX_STEPS_PER_S = 10_000
"""More than any pool can make: all ranks exchange headers before each step."""

MAX_BUSY_RATIO = 2.0
"""Seconds of steps, or of computing, that a rank may report per elapsed second. The true limit is
1, but the earlier of two reports may have been delayed longer."""

MAX_DELAY_S = 60.0
"""How much longer than its successor a report may be delayed."""


class StepCounters:
    """Cumulative steps, their time and computing time of the ranks of an epoch and the open window.

    With `is_heard_from_start`, the ranks' counters began while this object existed. Otherwise the
    first report of a rank is its baseline, because earlier steps are not part of the window.
    """

    def __init__(self, *, num_ranks: int, is_heard_from_start: bool) -> None:
        self._is_heard_from_start = is_heard_from_start
        self._steps = np.zeros(num_ranks, dtype=np.int64)
        self._busy_us = np.zeros(num_ranks, dtype=np.int64)
        self._step_us = np.zeros(num_ranks, dtype=np.int64)
        self._steps_at_open = np.zeros(num_ranks, dtype=np.int64)
        self._busy_us_at_open = np.zeros(num_ranks, dtype=np.int64)
        self._step_us_at_open = np.zeros(num_ranks, dtype=np.int64)
        self._reported_s = np.full(num_ranks, np.nan)
        self._reported_in: list[tuple[int, Phase]] = [(0, Phase.MIXED)] * num_ranks

    def steps_since_report(
        self, rank: int, steps: int, *, busy_us: int, step_us: int = 0, now: float
    ) -> int:
        """Return the steps since the last report of `rank`; negative if this one is older.

        Raises:
            InvalidReportError: the rank cannot have made that many steps since then, or stepped or
                computed for that long ("report_implausible").
        """
        if not 0 <= rank < len(self._steps):
            return steps
        num_steps = steps - int(self._steps[rank])
        if np.isnan(self._reported_s[rank]):
            return num_steps
        elapsed_s = now - float(self._reported_s[rank])
        longest_s = elapsed_s + MAX_DELAY_S
        busy_s = (busy_us - int(self._busy_us[rank])) / 1e6
        step_s = (step_us - int(self._step_us[rank])) / 1e6
        for count, unit, most in (
            (num_steps, "steps", MAX_STEPS_PER_S * longest_s),
            (busy_s, "s of computing", MAX_BUSY_RATIO * longest_s),
            (step_s, "s of steps", MAX_BUSY_RATIO * longest_s),
        ):
            if count > most:
                raise InvalidReportError(
                    "report_implausible",
                    f"rank {rank} reports {count:.0f} {unit} in {elapsed_s:.0f} s, more than "
                    f"{most:.0f}: restart it",
                )
        return num_steps

    def accept(
        self,
        report: LoadReport,
        *,
        steps: int,
        busy_us: int,
        step_us: int = 0,
        has_grown: bool,
        now: float,
    ) -> bool:
        """Record the steps of a report, if it is the latest of its rank; return whether it is.

        More steps make it the latest, and so does a newer generation, or more assignments
        (`has_grown`): assignments are checked by themselves, and a late report never has more. Then
        the steps known before were wrong.
        """
        rank, reported_in = report.rank, (report.generation, report.phase)
        if np.isnan(self._reported_s[rank]) and not self._is_heard_from_start:
            self._steps_at_open[rank], self._busy_us_at_open[rank] = steps, busy_us
            self._step_us_at_open[rank] = step_us
        known, known_in = int(self._steps[rank]), self._reported_in[rank]
        # A report of another generation or phase may be late and still have more assignments.
        is_next = reported_in == known_in and (has_grown or steps == known)
        is_latest = steps > known or report.generation > known_in[0] or is_next
        if is_latest:
            self._steps[rank], self._busy_us[rank] = steps, busy_us
            self._step_us[rank] = step_us
            self._reported_s[rank], self._reported_in[rank] = now, reported_in
        return is_latest

    def in_window(self) -> Indices:
        """Return the steps of each rank in the open window, [ranks]; not above 0 if unknown."""
        return self._steps - self._steps_at_open

    def pace(self, rank_load: Load) -> RankPace | None:
        """Return each rank's computing time per step; None if a rank has no steps or no time.

        `rank_load` is [layers, ranks] in assignments.
        """
        steps = self.in_window()
        busy_us = (self._busy_us - self._busy_us_at_open).astype(np.float64)
        if (steps <= 0).any() or (busy_us <= 0).any():
            return None
        return RankPace(busy_us=busy_us / steps, load=rank_load.sum(axis=0), steps=int(steps.min()))

    def step_window(self, rank_load: Load) -> StepWindow | None:
        """Return what the steps of the open window took, for `rank_load`, [layers, ranks].

        The load is that of equally many steps of each rank. None if a rank made too few steps, or
        if most ranks do not report how long they took.
        """
        steps = self.in_window()
        if (steps < MIN_STEPS).any():
            return None
        # The median, because a rank may wait for an idle peer before a step, or report falsely.
        step_us = np.sort((self._step_us - self._step_us_at_open) / steps)[(len(steps) - 1) // 2]
        if step_us <= 0:
            return None
        num_steps = common_steps(steps)
        busy_s = (self._busy_us - self._busy_us_at_open) / (1e6 * steps)
        load_gap, busy_gap_s = (
            compare_ranks(rank_load.sum(axis=0) / num_steps, busy_s) if busy_s.all() else (0.0, 0.0)
        )
        return StepWindow(
            step_s=float(step_us) / 1e6,
            max_rank_load=float(rank_load.max(axis=1).sum()) / num_steps,
            mean_rank_load=float(rank_load.mean(axis=1).sum()) / num_steps,
            num_steps=num_steps,
            load_gap=load_gap,
            busy_gap_s=busy_gap_s,
        )

    def open_next(self) -> None:
        """Start the next window."""
        self._steps_at_open = self._steps.copy()
        self._busy_us_at_open = self._busy_us.copy()
        self._step_us_at_open = self._step_us.copy()

"""`StepCounters`: the steps that ranks told of, and how long they computed in them.

Ranks step together, so their step counts make the loads of ranks that report at different moments
comparable. Like assignments, step counts are cumulative; a report of them may be lost, late,
repeated or false.
"""

import numpy as np

from equipoise.planning.arrays import Indices, Load
from equipoise.planning.counters import LoadReport, Phase
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.slowness import RankPace

MAX_STEPS_PER_S = 10_000
"""More than any pool makes: before each step all its ranks exchange headers."""

MAX_BUSY_RATIO = 2.0
"""Seconds of computing that a rank may tell of for each that passed. One would be true, but of two
reports the first may have been held up longer; with more than one that is forgotten in time."""

MAX_DELAY_S = 60.0
"""By how much longer than its successor a report may be held up."""


class StepCounters:
    """Cumulative steps and computing time of the ranks of one epoch, and those of a window.

    With `is_heard_from_start` the ranks' counts began while this object listens; else the first
    report of a rank is its baseline, because what came before is no part of the window.
    """

    def __init__(self, *, num_ranks: int, is_heard_from_start: bool) -> None:
        self._is_heard_from_start = is_heard_from_start
        self._steps = np.zeros(num_ranks, dtype=np.int64)
        self._busy_us = np.zeros(num_ranks, dtype=np.int64)
        self._steps_at_open = np.zeros(num_ranks, dtype=np.int64)
        self._busy_us_at_open = np.zeros(num_ranks, dtype=np.int64)
        self._told_s = np.full(num_ranks, np.nan)
        self._told_in: list[tuple[int, Phase]] = [(0, Phase.MIXED)] * num_ranks

    def since_told(self, rank: int, steps: int, *, busy_us: int, now: float) -> int:
        """By how many steps a report of `rank` is ahead of what is known; below 0 if behind.

        Raises:
            InvalidReportError: the rank cannot have made so many steps since then, or computed for
                so long ("report_implausible").
        """
        if not 0 <= rank < len(self._steps):
            return steps
        num_steps = steps - int(self._steps[rank])
        if np.isnan(self._told_s[rank]):
            return num_steps
        elapsed_s = now - float(self._told_s[rank])
        longest_s = elapsed_s + MAX_DELAY_S
        busy_s = (busy_us - int(self._busy_us[rank])) / 1e6
        for told, unit, most in (
            (num_steps, "steps", MAX_STEPS_PER_S * longest_s),
            (busy_s, "s of computing", MAX_BUSY_RATIO * longest_s),
        ):
            if told > most:
                raise InvalidReportError(
                    "report_implausible",
                    f"rank {rank} tells of {told:.0f} {unit} since a report of {elapsed_s:.0f} s "
                    f"ago, more than {most:.0f}: restart it",
                )
        return num_steps

    def accept(
        self, report: LoadReport, *, steps: int, busy_us: int, has_grown: bool, now: float
    ) -> None:
        """Remember what came with a report, if it is the latest of its rank.

        More steps make it the latest, and so does a newer generation, or more assignments
        (`has_grown`): assignments are checked by themselves, and a late report never has more. Then
        the steps known before were wrong.
        """
        rank, told_in = report.rank, (report.generation, report.phase)
        if np.isnan(self._told_s[rank]) and not self._is_heard_from_start:
            self._steps_at_open[rank], self._busy_us_at_open[rank] = steps, busy_us
        known, known_in = int(self._steps[rank]), self._told_in[rank]
        # Counts of another generation or phase may be late, and more than was known of that one.
        is_next = told_in == known_in and (has_grown or steps == known)
        if steps > known or report.generation > known_in[0] or is_next:
            self._steps[rank], self._busy_us[rank] = steps, busy_us
            self._told_s[rank], self._told_in[rank] = now, told_in

    def to_common_steps(self) -> Load:
        """Factors, [ranks], that bring each rank's load to the same number of steps.

        Without this, a window that caught one report more of a rank would call it overloaded.
        """
        steps = self._in_window().astype(np.float64)
        if (steps <= 0).any():
            return np.ones_like(steps)
        factors: Load = steps.mean() / steps
        return factors

    def pace(self, rank_load: Load) -> RankPace | None:
        """How long each rank computed for a step; None if one of them made none or did not tell.

        `rank_load` is what each received, [layers, ranks] in assignments.
        """
        steps = self._in_window()
        busy_us = (self._busy_us - self._busy_us_at_open).astype(np.float64)
        if (steps <= 0).any() or (busy_us <= 0).any():
            return None
        return RankPace(busy_us=busy_us / steps, load=rank_load.sum(axis=0), steps=int(steps.min()))

    def open_next(self) -> None:
        """What is told from now on is of the next window."""
        self._steps_at_open = self._steps.copy()
        self._busy_us_at_open = self._busy_us.copy()

    def _in_window(self) -> Indices:
        return self._steps - self._steps_at_open

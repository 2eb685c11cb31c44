"""`Interruptions`: workers that end one epoch after another although no other rank is missing.

Each loss of a group costs all ranks a pause, and the worker that reports it first need not be at
fault: a flaky network looks the same. So nobody is left out for good, but each time for longer.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from equipoise.pool.effects import Chain, Log
from equipoise.pool.member import Member
from equipoise.pool.members import Roster

SHORT_S = 60.0
"""An epoch whose ranks served for less is a short one."""

MAX_SHORT = 3
"""Short epochs that a worker may end in succession before it is left out."""

FIRST_ABSENCE_S = 30.0
"""How long it is left out the first time; twice as long after each further short epoch."""

MAX_ABSENCE_S = 3600.0
"""The longest that it is left out at once."""

MAX_WORKERS = 64
"""Workers that are remembered; of more, those that ended an epoch least recently are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absence:
    """A worker gets no rank until a time, and why."""

    until_s: float
    reason: str


class Interruptions:
    """Which workers of a pool are left out for a while because they end its epochs."""

    def __init__(self, *, roster: Roster) -> None:
        self._roster = roster
        self._culprit = ""
        self._serving_since_s: float | None = None
        self._ended_s = math.inf
        self._short: dict[str, int] = {}
        self._absences: dict[str, _Absence] = {}

    @property
    def excluded(self) -> Mapping[str, str]:
        """Workers that get no rank for now, and why."""
        return {name: absence.reason for name, absence in self._absences.items()}

    def excluded_workers(self, *, now: float) -> Mapping[str, str]:
        """As `excluded`, after those whose time is over may return."""
        for name in [name for name, one in self._absences.items() if now >= one.until_s]:
            del self._absences[name]
        return self.excluded

    def begin_epoch(self, *, now: float) -> None:
        """A long epoch makes up for what its ranks did before. It runs before ranks change."""
        if self._served_s(now=now) >= SHORT_S:
            for member in self._roster.seated():
                self._short.pop(member.name, None)
        self._culprit, self._serving_since_s, self._ended_s = "", None, math.inf

    def note_serving(self, *, now: float) -> None:
        """All ranks of the epoch serve."""
        self._serving_since_s = now

    def note_end(self, member: Member, *, now: float) -> None:
        """A rank reports that it cannot continue in the epoch; only the first one counts."""
        self._culprit = self._culprit or member.name
        self._ended_s = min(self._ended_s, now)

    def judge(self, *, silent: Container[str], now: float) -> Chain:
        """Another epoch is due: leave out the worker that ended this one if it does so repeatedly.

        Nobody is to blame if a rank is gone, has restarted or is `silent`.
        """
        culprit, self._culprit = self._culprit, ""
        seated = self._roster.seated()
        is_complete = len(seated) == self._roster.num_ranks and all(
            member.connected and member.name not in silent for member in seated
        )
        if not culprit or not is_complete or self._served_s(now=now) >= SHORT_S:
            return ()
        count = self._short.pop(culprit, 0) + 1
        self._short[culprit] = count
        for forgotten in list(self._short)[:-MAX_WORKERS]:
            del self._short[forgotten]
        if count < MAX_SHORT:
            return ()
        return self._leave_out(culprit, count=count, now=now)

    def recall(self) -> Chain:
        """Too few workers are left without these: an interrupted pool is better than none."""
        if not self._absences:
            return ()
        text = f"workers that end epochs are needed after all: {', '.join(self._absences)}"
        self._absences.clear()
        return (Log(text=text, is_warning=True),)

    def _leave_out(self, worker: str, *, count: int, now: float) -> Chain:
        absence_s = min(FIRST_ABSENCE_S * 2.0 ** min(count - MAX_SHORT, 16), MAX_ABSENCE_S)
        until = datetime.fromtimestamp(now + absence_s, UTC)
        reason = (
            f"it ended {count} epochs after less than {SHORT_S:g} s although no other rank was "
            f"missing; it may return at {until:%H:%M:%S} UTC"
        )
        self._absences[worker] = _Absence(until_s=now + absence_s, reason=reason)
        return (
            Log(
                text=f"worker {worker} is left out: {reason}",
                is_warning=True,
                worker=worker,
                epoch=self._roster.epoch,
            ),
        )

    def _served_s(self, *, now: float) -> float:
        """Seconds that all ranks served, until one of them reported that it could not."""
        if self._serving_since_s is None:
            return 0.0
        return max(0.0, min(now, self._ended_s) - self._serving_since_s)

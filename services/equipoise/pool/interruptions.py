"""`Interruptions`: short epochs, one after another, and the workers that end them.

Each loss of a group costs all ranks a pause, and the worker that is blamed need not be at fault: a
flaky network looks the same. So no worker is excluded for good, but each time for longer.

If a rank is gone, it is blamed, unless most of the pool's workers die in turn. Otherwise, if the
group served, the rank that reports its end first is blamed. If the ranks never met, the
first report only shows which timeout was shorter. Then those are blamed that several ranks could
not connect to (`reachability`). If the reports do not show that, the ranks that were not in the
latest group that served are blamed if only some were not, otherwise rank 0, which hosts the
rendezvous. If some ranks hang, only those are blamed that others could not reach in the epochs
before.

If no group works whoever is in it, because ranks cannot exchange rows for example, blame does not
help. So after a few epochs in a row that failed at once, the next ones open ever later.
"""

import math
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from equipoise.planning.setbacks import Setbacks
from equipoise.pool.effects import Chain, Log
from equipoise.pool.epochs import MAX_EPOCHS
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.reachability import Blame, Process, Reachability, process_of
from equipoise.wire.messages import GroupLost

SHORT_S = 60.0
"""An epoch whose ranks served for less is a short one."""

MAX_SHORT = 3
"""Short epochs that a worker may end in succession before it is excluded."""

MAX_CRASHES = 5
"""Short epochs in which a worker may die before it is excluded."""

FIRST_ABSENCE_S = 30.0
"""How long it is excluded the first time; twice as long after each further short epoch."""

MAX_ABSENCE_S = 3600.0
"""The longest that it is excluded at a time."""

LONG_WAIT_S = 30.0
"""A new rank for which the others waited this long in vain is excluded at once."""

COST_FACTOR = 10
"""If ranks do not meet, the worker blamed is excluded this many times as long as they waited."""

FAILED_S = 5.0
"""An epoch failed at once if its ranks served for less, or if they did not serve and gave up within
that time, and most of them report it."""

MAX_FAILED = 3
"""Epochs in a row that may fail at once before the next one has to wait."""

FIRST_INTERVAL_S = 1.0
"""Seconds from one epoch to the next after that; twice as long after each further failure."""

MAX_INTERVAL_S = 30.0
"""The longest such interval."""

MAX_WORKERS = 64
"""Workers that are remembered; of more, those that ended an epoch least recently are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absence:
    """A worker gets no rank until a time, and why."""

    until_s: float
    reason: str


class Interruptions:
    """Which workers of a pool are excluded for a while because they end its epochs."""

    def __init__(self, *, roster: Roster) -> None:
        self._roster = roster
        # Ranks that reported the end of the epoch, the first one first, and whether they said which
        # peers they could not reach; what the first one said.
        self._enders: dict[str, bool] = {}
        self._why = ""
        self._is_judged = False
        self._reachability = Reachability()
        # The ranks of the latest epochs that are over.
        self._ranks_of: dict[int, tuple[Process, ...]] = {}
        self._opened_s = self._ended_s = math.inf
        self._serving_since_s: float | None = None
        # Names and boot IDs of the ranks of the latest epoch that served.
        self._proven: frozenset[tuple[str, str]] = frozenset()
        self._short: dict[str, int] = {}
        self._absences: dict[str, _Absence] = {}
        self._failed_hosts: dict[str, None] = {}
        # Epochs in a row that failed at once, by when they opened, and who was excluded for them.
        self._failed = Setbacks()
        self._tried: set[str] = set()
        self._needs_no_wait = False
        # Short epochs in which a worker died or restarted.
        self._deaths: Counter[str] = Counter()

    @property
    def failed_hosts(self) -> Container[str]:
        """Workers that should not host the rendezvous, because ranks did not meet there."""
        return self._failed_hosts

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
        served_s = self._served_s(now=now)
        if served_s >= SHORT_S:
            for member in self._roster.seated():
                self._short.pop(member.name, None)
                self._deaths.pop(member.name, None)
        if served_s >= FAILED_S:
            self._failed = Setbacks()
            self._tried.clear()
        self._ranks_of[self._roster.epoch] = tuple(map(process_of, self._roster.seated()))
        for forgotten in list(self._ranks_of)[:-MAX_EPOCHS]:
            del self._ranks_of[forgotten]
        self._enders.clear()
        self._is_judged = self._needs_no_wait = False
        self._opened_s, self._serving_since_s, self._ended_s = now, None, math.inf

    def note_serving(self, *, now: float) -> None:
        """All ranks of the epoch serve."""
        self._serving_since_s = now
        self._proven = frozenset(map(process_of, self._roster.seated()))
        self._reachability.note_serving(self._roster.seated())

    def note_end(self, member: Member, *, lost: GroupLost | None, now: float) -> None:
        """A rank reports that it cannot continue in the epoch, perhaps that its group is lost."""
        roster, name = self._roster, member.name
        if not self._enders:
            self._why = f"{name}: {lost.reason if lost is not None else 'it rejected the epoch'}"
        self._enders[name] = self._enders.get(name, False) or lost is not None
        self._ended_s = min(self._ended_s, now)
        if lost is not None:
            ranks = tuple(map(process_of, roster.seated()))
            self._reachability.note(name, lost.unreached, ranks=ranks, known=roster.members)

    def note_left_out(self, member: Member, lost: GroupLost) -> None:
        """A worker without a rank reports which peers it could not reach when it had one."""
        ranks = self._ranks_of.get(lost.epoch, ())
        if process_of(member) in ranks:
            known = self._roster.members
            self._reachability.note(member.name, lost.unreached, ranks=ranks, known=known)

    def judge(self, *, silent: Container[str], is_hanging: bool, now: float) -> Chain:
        """Another epoch is due: exclude the worker that ended this one if it does so repeatedly.

        If ranks are gone or have restarted, no other worker is blamed, and none if one is `silent`.
        If some did not leave the group in time (`is_hanging`), it does not matter who reported its
        end first: only those are blamed that others reported as out of reach before. An epoch is
        judged once, however long the next one has to wait.
        """
        seated, departed = self._roster.seated(), self._roster.departed
        if self._is_judged or self._served_s(now=now) >= SHORT_S:
            return ()
        if departed:
            self._is_judged = True
            return self._count_deaths(departed, now=now)
        is_complete = len(seated) == self._roster.num_ranks and all(
            member.connected and member.name not in silent for member in seated
        )
        if not (self._enders and is_complete):
            return ()
        if is_hanging:
            return self._judge_hanging(now=now)
        self._is_judged = True
        enders = tuple(self._enders)
        reporters = frozenset(name for name, is_report in self._enders.items() if is_report)
        is_agreed = 2 * len(enders) > len(seated)
        warning = self._note_failure(now=now) if is_agreed else ()
        if self._serving_since_s is not None or not is_agreed:
            return (*warning, *self._count(enders[0], now=now))
        return (*warning, *self._judge_meeting(reporters, now=now))

    def wait(self, *, now: float) -> str:
        """Why the next epoch has to wait; empty if it may open.

        It opens at once if a worker that is probably at fault has just been excluded.
        """
        has_to_wait = now < self._may_open_s and not self._needs_no_wait
        return self._describe_failures() if has_to_wait else ""

    def recall(self) -> Chain:
        """Let one return, because too few slots are left: an interrupted pool is better than none.

        They return one at a time, so that the pool may serve without the one at fault.
        """
        if not self._absences:
            return ()
        self._needs_no_wait = False
        least = min(self._absences, key=lambda name: (self._short.get(name, 0), name))
        reason = self._absences.pop(least).reason
        text = f"worker {least} is needed after all: it was excluded because {reason}"
        return (Log(text=text, is_warning=True, worker=least),)

    def _judge_meeting(self, reporters: Container[str], *, now: float) -> Chain:
        """The ranks did not meet: blame those that others could not reach, by the `reporters`.

        If they do not show who that is, blame those that have yet to serve, otherwise rank 0.
        """
        seated = self._roster.seated()
        found = self._reachability.blame(seated, reporters=reporters)
        if found.workers:
            return self._blame_unreachable(found, now=now)
        unproven = tuple(one.name for one in seated if process_of(one) not in self._proven)
        if 0 < len(unproven) < len(seated):
            what = f"{self._missed} with it in the group: check that its peers can reach it"
            is_long = now - self._opened_s >= LONG_WAIT_S
            return self._blame_each(unproven, is_certain=is_long, what=what, now=now)
        what = f"{self._missed} at its rendezvous: check that peers can reach --rendezvous-port"
        if self._has_failed_at_once(now=now):  # Ranks wait for a rendezvous for longer.
            what = f"the ranks of epoch {self._roster.epoch} met but formed no group"
        return self._blame_each((seated[0].name,), is_certain=False, what=what, now=now)

    def _judge_hanging(self, *, now: float) -> Chain:
        """Some ranks hang: blame those that others could not reach in the epochs before, if any."""
        found = self._reachability.blame(self._roster.seated(), reporters=())
        if self._serving_since_s is not None or not found.workers:
            return ()
        self._is_judged = True
        return self._blame_unreachable(found, now=now)

    def _blame_unreachable(self, found: Blame, *, now: float) -> Chain:
        is_long = now - self._opened_s >= LONG_WAIT_S
        chain = self._blame_each(
            found.workers,
            is_certain=is_long or self._failed.count > MAX_FAILED,
            what=f"{self._missed}, and {found.why}: check its network and --rendezvous-port",
            now=now,
        )
        self._needs_no_wait = not self._absences.keys().isdisjoint(found.workers)
        return chain

    def _blame_each(
        self, culprits: Sequence[str], *, is_certain: bool, what: str, now: float
    ) -> Chain:
        """Exclude workers that kept ranks from meeting: at once if it `is_certain` that they did.

        They return one after another, so that the one at fault is found.
        """
        blame, host = self._exclude if is_certain else self._count, self._roster.seated()[0].name
        chains = [
            blame(name, now=now, what=what, after=place) for place, name in enumerate(culprits)
        ]
        if host in self._absences:
            self._note_failed_host(host)
        return tuple(effect for chain in chains for effect in chain)

    @property
    def _missed(self) -> str:
        return f"the ranks of epoch {self._roster.epoch} did not meet"

    def _note_failed_host(self, host: str) -> None:
        self._failed_hosts.pop(host, None)
        self._failed_hosts[host] = None
        for forgotten in list(self._failed_hosts)[:-MAX_WORKERS]:
            del self._failed_hosts[forgotten]

    def _count_deaths(self, departed: Collection[str], *, now: float) -> Chain:
        """Exclude workers that died in one short epoch after another.

        If more than half of the workers die in turn, none of them is the cause of what was before.
        """
        self._deaths.update(departed)
        if 2 * len(self._deaths) > self._roster.intended_ranks:
            self._deaths = Counter(departed)
        looping = [name for name in departed if self._deaths[name] >= MAX_CRASHES]
        chains = [
            self._exclude(
                name,
                now=now,
                what=f"it died or restarted in {self._deaths[name]} epochs before they had served "
                f"for {SHORT_S:g} s",
                after=place,
            )
            for place, name in enumerate(looping)
        ]
        return tuple(effect for chain in chains for effect in chain)

    def _count(self, culprit: str, *, now: float, what: str = "", after: int = 0) -> Chain:
        """Exclude a worker, as `_exclude` does, if it has ended enough epochs by now."""
        if self._short.get(culprit, 0) + 1 >= MAX_SHORT:
            return self._exclude(culprit, now=now, what=what, after=after)
        self._remember(culprit, self._short.get(culprit, 0) + 1)
        return ()

    def _remember(self, worker: str, count: int) -> None:
        self._short.pop(worker, None)
        self._short[worker] = count
        for forgotten in list(self._short)[:-MAX_WORKERS]:
            del self._short[forgotten]

    def _exclude(self, worker: str, *, now: float, what: str, after: int = 0) -> Chain:
        """Exclude a worker because of `what`, or of the epochs that it ended if that is empty.

        If several are excluded at once, it returns `after` this many of them.
        """
        has_served = self._serving_since_s is not None
        ended = self._short.get(worker, 0) + 1
        self._remember(worker, count := max(ended, MAX_SHORT))
        if worker not in self._tried and len(self._tried) < MAX_WORKERS:
            self._needs_no_wait = True
            self._tried.add(worker)
        waited_s = 0.0 if has_served else max(0.0, min(now - self._opened_s, SHORT_S))
        first_s = max(FIRST_ABSENCE_S, COST_FACTOR * waited_s)
        absence_s = min(first_s * 2.0 ** min(count - MAX_SHORT, 16), MAX_ABSENCE_S)
        if self._failed.count > MAX_FAILED:
            # Groups that fail whoever is in them say little about a worker. But there has to be one
            # without it, however long that has to wait.
            absence_s = 2 * MAX_INTERVAL_S
        absence_s += after * FIRST_ABSENCE_S
        until = datetime.fromtimestamp(now + absence_s, UTC)
        ended_all = (
            f"it ended {ended} epochs after less than {SHORT_S:g} s although no other rank was "
            "missing"
        )
        reason = f"{what or ended_all}; it may return at {until:%H:%M:%S} UTC"
        self._absences[worker] = _Absence(until_s=now + absence_s, reason=reason)
        return (
            Log(
                text=f"worker {worker} is excluded: {reason}",
                is_warning=True,
                worker=worker,
                epoch=self._roster.epoch,
            ),
        )

    def _note_failure(self, *, now: float) -> Chain:
        """Count the epoch that has ended, if it failed at once."""
        if not self._has_failed_at_once(now=now):
            return ()
        self._failed = self._failed.one_more(self._why, now=min(self._opened_s, now))
        if now >= self._may_open_s:
            return ()
        text = self._describe_failures()
        return (Log(text=text, is_warning=True, epoch=self._roster.epoch),)

    def _has_failed_at_once(self, *, now: float) -> bool:
        """Whether the epoch that has ended did so within `FAILED_S`."""
        since_s = self._serving_since_s or min(self._opened_s, now)
        return self._ended_s - since_s < FAILED_S

    @property
    def _may_open_s(self) -> float:
        """From when on the next epoch may open."""
        return self._failed.latest_s + self._failed.backoff_s(
            first_s=FIRST_INTERVAL_S, longest_s=MAX_INTERVAL_S, num_free=MAX_FAILED - 1
        )

    def _describe_failures(self) -> str:
        opens = datetime.fromtimestamp(self._may_open_s, UTC)
        return (
            f"{self._failed.count} epochs in a row failed within {FAILED_S:g} s although no rank "
            f"was missing ({self._failed.reason}): epoch {self._roster.highest_epoch + 1} opens at "
            f"{opens:%H:%M:%S} UTC"
        )

    def _served_s(self, *, now: float) -> float:
        """Seconds that all ranks served, until one of them reported that it could not."""
        if self._serving_since_s is None:
            return 0.0
        return max(0.0, min(now, self._ended_s) - self._serving_since_s)

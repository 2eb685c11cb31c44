"""What is counted about a pool since this balancer leads, for status and metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from equipoise.planning.expected_gain import GainOutcome
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import State, Wave
from equipoise.telemetry.histogram import LONG_S, SHORT_S, Histogram
from equipoise.wire.checks import MAX_RANKS, total
from equipoise.wire.messages import Report, Staged, Wait, WorkerTimeout

WRITE_TIMEOUT_S = 10.0
"""Seconds a write to the store may take before it counts as failed."""

MAX_WORKERS = MAX_RANKS
"""Workers whose counts are kept: as many as may be connected; beyond it, those that have not
reported for longest are forgotten."""

MAX_GATEWAYS = 1024
"""Gateway processes whose counts are kept; beyond it, those that have not reported for longest are
forgotten."""

MAX_KINDS = 64
"""Kinds of rejections are constants of our own code; this limit guards against a mistake there."""

MAX_TEXT = 500
"""Characters kept of the latest rejection, because parts of it come from outside."""

PASSING = (State.PLANNED, State.STAGING, State.STAGED, State.SWITCHED)
"""States that a wave passes through, so that time spent in them is measured."""

_OTHERS = "others"

_TIMEOUT_OF_STATE = {
    State.PLANNED: "persist",
    State.STAGING: "stage",
    State.STAGED: "switch",
    State.SWITCHED: "commit",
}

_WAITS = frozenset(Wait)


def answer_timeout_s(policy: Policy) -> float:
    """Seconds within which an operator's request is answered.

    It covers the wait for a plan in progress, a plan and the wait for its turn, earlier writes, and
    the write of the audit record.
    """
    return 3 * policy.plan_timeout_s + 2 * WRITE_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """A wait that has a timeout, and how often it was reached."""

    name: str
    """Name of the wait."""

    timeout_s: float
    """Timeout, seconds."""

    reached: int = 0
    """How often the wait timed out."""

    latest: str = ""
    """What happened the last time."""

    def again(self, what: str) -> "Timeout":
        """Count one more; `what` says what was done about it."""
        return replace(self, reached=self.reached + 1, latest=what)


class Timeouts:
    """Counts how often each wait timed out; it measures nothing itself.

    Workers count their own waits since they started; their reports are added up by name. A count
    that falls takes nothing back, and adds nothing until it exceeds the highest one before.
    """

    def __init__(self, policy: Policy) -> None:
        self._by_name: dict[str, Timeout] = {}
        self._of_worker: dict[str, _WorkerCounts] = {}
        self.adopt(policy)

    def adopt(self, policy: Policy) -> None:
        """Take the lengths of waits from `policy`; the counts stay."""
        for name, timeout_s in (
            ("plan", policy.plan_timeout_s),
            ("stage", policy.stage_timeout_s),
            ("switch", policy.switch_timeout_s),
            ("persist", policy.stage_timeout_s),
            ("commit", policy.switch_timeout_s),
            ("store", WRITE_TIMEOUT_S),
            ("report", policy.report_timeout_s),
            ("reform", policy.reform_timeout_s),
            ("meet", policy.meet_timeout_s),
            ("join", policy.join_timeout_s),
            ("start", policy.start_timeout_s),
        ):
            known = self._by_name.get(name)
            if known is None:
                self._by_name[name] = Timeout(name=name, timeout_s=timeout_s)
            elif known.timeout_s != timeout_s:
                self._by_name[name] = replace(known, timeout_s=timeout_s)

    def note(self, name: str, what: str) -> None:
        """A wait timed out; `what` says what was done about it."""
        self._by_name[name] = self._by_name[name].again(what)

    def note_wave(self, before: Wave, after: Wave | None) -> None:
        """Time passed for a wave; if that changed it, its wait timed out."""
        if after is not None and after.reason != before.reason:
            self.note(_TIMEOUT_OF_STATE[before.state], after.reason)

    def add(
        self, worker: str, *, boot_id: str, reported: Sequence[WorkerTimeout]
    ) -> tuple[str, ...]:
        """Add what a worker counted since its last report; returns the names that are unknown."""
        if not reported:
            return ()
        known = self._of_worker.pop(worker, None)
        if known is None or known.boot_id != boot_id:
            known = _WorkerCounts(boot_id=boot_id)
        while len(self._of_worker) >= MAX_WORKERS:
            del self._of_worker[next(iter(self._of_worker))]
        self._of_worker[worker] = known
        for timeout in reported:
            if timeout.name in _WAITS:
                self._add(worker, timeout, before=known.reached.get(timeout.name, 0))
                known.note(timeout)
        return tuple(timeout.name for timeout in reported if timeout.name not in _WAITS)

    def all(self) -> tuple[Timeout, ...]:
        """Every timeout; those of workers once one has reported them."""
        return tuple(self._by_name.values())

    def _add(self, worker: str, reported: WorkerTimeout, *, before: int) -> None:
        known = self._by_name.get(reported.name)
        grown = max(0, reported.reached - before)
        if known is None:
            known = Timeout(name=reported.name, timeout_s=reported.timeout_s)
        elif not grown and known.timeout_s == reported.timeout_s:
            return
        self._by_name[reported.name] = Timeout(
            name=reported.name,
            timeout_s=reported.timeout_s,
            reached=total(known.reached, grown),
            latest=f"{worker}: {reported.latest}" if grown else known.latest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerCounts:
    """How often each wait timed out since a worker's boot, at most."""

    boot_id: str
    reached: dict[str, int] = field(default_factory=dict)

    def note(self, timeout: WorkerTimeout) -> None:
        self.reached[timeout.name] = max(timeout.reached, self.reached.get(timeout.name, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionCount:
    """One kind of rejected input."""

    kind: str
    """Constant that names the kind."""

    count: int
    """How often it was rejected."""

    latest: str
    """The latest reason."""


class Rejections:
    """Counts rejections by kind, in bounded memory."""

    def __init__(self) -> None:
        self._by_kind: dict[str, RejectionCount] = {}

    def count(self, kind: str, latest: str) -> None:
        """Count one of a kind; `latest` names the worker and the value."""
        if kind not in self._by_kind and len(self._by_kind) >= MAX_KINDS:
            kind = _OTHERS
        known = self._by_kind.get(kind, RejectionCount(kind=kind, count=0, latest=""))
        self._by_kind[kind] = replace(known, count=known.count + 1, latest=latest[:MAX_TEXT])

    def of(self, kind: str) -> int:
        """How often a kind was rejected."""
        return self._by_kind[kind].count if kind in self._by_kind else 0

    def all(self) -> tuple[RejectionCount, ...]:
        """Every kind seen so far, sorted by kind."""
        return tuple(self._by_kind[kind] for kind in sorted(self._by_kind))


class PoisonRequests:
    """Counts requests that gateways rejected because ranks failed while running them."""

    def __init__(self) -> None:
        self.total = 0
        """By all gateways that have reported here, since they started."""
        self._by_gateway: dict[str, int] = {}

    def note(self, boot_id: str, num_rejected: int) -> None:
        """A gateway's process reports how many it has rejected since it started."""
        before = self._by_gateway.pop(boot_id, 0)
        while len(self._by_gateway) >= MAX_GATEWAYS:
            del self._by_gateway[next(iter(self._by_gateway))]
        self.total = total(self.total, max(0, num_rejected - before))
        self._by_gateway[boot_id] = max(num_rejected, before)


def _of_states() -> dict[State, Histogram]:
    return {state: Histogram(LONG_S) for state in PASSING}


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counters that only grow. Durations are in seconds."""

    accepted: int = 0
    """Plans with the verdict yes."""

    declined: int = 0
    """Plans with the verdict no, and windows on which none was made."""

    shifts: int = 0
    """Windows in which traffic had shifted."""

    waves: int = 0
    """Waves that all ranks switched to."""

    moves: int = 0
    """Slots that these waves changed."""

    peer_bytes: int = 0
    """Bytes that ranks pulled from peers."""

    checkpoint_bytes: int = 0
    """Bytes that ranks pulled from the checkpoint."""

    rolled_back: int = 0
    """Rollouts that were rolled back."""

    slow_found: int = 0
    """How often a rank was found to be slow."""

    judged: Counter[GainOutcome] = field(default_factory=Counter)
    """Judged rollouts, by outcome."""

    plan_s: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    """Time that a plan took."""

    wave_s: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    """Time from the first Stage of a wave to the last report of its switch."""

    stall_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    """Longest stall of a rank at a switch."""

    state_s: dict[State, Histogram] = field(default_factory=_of_states)
    """Time that waves spent in each state."""

    def note_decision(self, *, accepted: bool, plan_s: float) -> None:
        """There is a verdict on a plan that took `plan_s`."""
        self.accepted += accepted
        self.declined += not accepted
        self.plan_s.observe(plan_s)

    def note_undecided(self) -> None:
        """A window had traffic, but no plan could be made on it."""
        self.declined += 1

    def note_window(self, *, shifted: bool) -> None:
        """A window has closed."""
        self.shifts += shifted

    def note_slow(self, num_ranks: int) -> None:
        """Ranks were found to be slow."""
        self.slow_found += num_ranks

    def note_judged(self, outcome: GainOutcome) -> None:
        """A rollout was judged."""
        self.judged[outcome] += 1
        self.rolled_back += outcome is GainOutcome.ROLLED_BACK

    def note_state_left(self, state: State, *, after_s: float) -> None:
        """A wave left a state after `after_s` in it."""
        if state in self.state_s:
            self.state_s[state].observe(max(0.0, after_s))

    def note_staged(self, staged: Staged) -> None:
        """A rank has staged a wave."""
        self.peer_bytes += staged.peer_bytes
        self.checkpoint_bytes += staged.checkpoint_bytes

    def note_switch(self, *, moves: int, wave_s: float, stall_s: float) -> None:
        """All ranks reported their switch, the longest of which took `stall_s`."""
        self.waves += 1
        self.moves += moves
        self.wave_s.observe(max(0.0, wave_s))
        self.stall_s.observe(stall_s)


class Counters:
    """All that is counted about one pool."""

    def __init__(self, policy: Policy) -> None:
        self.timeouts = Timeouts(policy)
        self.tally = Tally()
        self.rejections = Rejections()
        self.poison = PoisonRequests()

    def note_report(self, worker: str, report: Report) -> None:
        """Add up the waits of a worker that timed out; unknown kinds are rejected."""
        boot_id = report.load.boot_id
        for name in self.timeouts.add(worker, boot_id=boot_id, reported=report.stats.timeouts):
            self.rejections.count("report_timeouts", f"worker {worker} reports a timeout {name!r}")

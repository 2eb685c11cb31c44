"""`Pool`: everything that is known of one pool now, and the one way in which rollouts move on."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from equipoise.planning.arrays import Checksums, Load
from equipoise.planning.expected_gain import ExpectedGain, ObservedWindow, RealisedGain
from equipoise.planning.layout import Layout
from equipoise.planning.membership import EpochDecision
from equipoise.planning.moves import Move
from equipoise.planning.policy import Policy, StoreDown
from equipoise.planning.rollout import (
    Commands,
    DeadlineCheck,
    Event,
    PersistCommitted,
    PersistProposed,
    RankRefused,
)
from equipoise.planning.setbacks import Setbacks
from equipoise.planning.slowness import RankPace, SlowRank
from equipoise.policy.book import PolicyBook, PolicyInForce
from equipoise.pool.checksums import ChecksumTable
from equipoise.pool.commands import orders
from equipoise.pool.counters import Bounds
from equipoise.pool.effects import Chain, WriteDecision
from equipoise.pool.epoch_log import EpochLog, Unwritten
from equipoise.pool.health import Diagnosis, Health, diagnose
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.loads import ClosedWindow, PoolLoads
from equipoise.pool.members import Member, Roster
from equipoise.pool.records import (
    MAX_AUDIT,
    SLOW,
    AuditRecord,
    AverageRecord,
    DecisionRecord,
    Hold,
    PoolMemory,
)
from equipoise.pool.refusals import Refusals
from equipoise.pool.requests import AdminRequest
from equipoise.pool.rollouts import Rollouts
from equipoise.pool.tally import Tally
from equipoise.wire.messages import Report

MAX_WINDOWS = 128
"""Closed windows kept for people to plot."""


MAX_PACES = 100
"""Windows kept to find slow ranks by: the most that a policy may ask for."""


MAX_JUDGED = 16
"""Judged rollouts kept for people to look at."""


MAX_LATE = 100
"""Verdicts kept for a store that takes no writes; older ones are dropped."""


@dataclass(slots=True, kw_only=True)
class WatchedRollout:
    """A rollout that is held to its promise by the windows that witnessed it."""

    promise: ExpectedGain
    witnesses: list[ObservedWindow] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """What became of a rollout's promise, and when that was seen."""

    promise: ExpectedGain
    realised: RealisedGain
    judged_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A worker takes part in no epoch until a time, and why."""

    until_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Postponed:
    """An order that waits for the plan under way, and until when it is worth to be looked at."""

    request: AdminRequest
    until_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """State of one pool; `PoolController` is its only owner, status reads it.

    `faults` are troubles in words by what they concern, `silent` by rank. `loads`, `checksums` are
    of this epoch; `loads` is None until all ranks serve. `verified` are the checksums of an earlier
    epoch, uint8 [layers, experts, 16]. `opening` is the latest decision about the next epoch,
    `moves` by rank bring the ranks of this one to its first layout. `unwritten` is what opens the
    epoch, until the store has it. `unheard` are workers that the store knows and that were not
    heard of. `verdict` is the one that is being rolled out or was last. `elsewhere` says why its
    ranks are not here, for a balancer that does not lead; else it is empty. `opened_here` tells an
    epoch that this balancer opened from one that it found. `adopting` is a generation on its way to
    the store. `hold` is what an operator holds it to, `audit` are the latest orders, newest first.
    `policy_revision` is that of `policies` which `in_force` is of, `recorded_policy` the digest
    that the store knows. `watched` is the latest rollout until it was judged, `judged` are those
    before, newest first, `rolled_back_s` is when one was rolled back last, `setbacks` are rollouts
    in a row that came to nothing. `paces` are of the
    windows of this epoch, `slow` are ranks that they show to be slow, `excluded` workers by name.
    `late` are verdicts that the store has yet to take, `postponed` orders that wait for the plan
    under way to end. Before `quiet_until_s` no worker can count
    as silent, whatever it does; `looked_s` is when the clock last asked for an epoch.
    `revision` grows with every change.
    """

    name: str
    policies: PolicyBook
    in_force: PolicyInForce
    roster: Roster
    layouts: PoolLayouts
    rollouts: Rollouts
    bounds: Bounds
    averages: Mapping[str, AverageRecord]
    last_decision: DecisionRecord | None
    verdict: DecisionRecord | None = None
    tally: Tally = field(default_factory=Tally)
    refusals: Refusals = field(default_factory=Refusals)
    windows: deque[ClosedWindow] = field(default_factory=lambda: deque(maxlen=MAX_WINDOWS))
    windows_closed: int = 0
    loads: PoolLoads | None = None
    checksums: ChecksumTable | None = None
    verified: Checksums | None = None
    opening: EpochDecision = field(default_factory=EpochDecision)
    moves: Mapping[int, tuple[Move, ...]] = field(default_factory=dict)
    unwritten: Unwritten = field(default_factory=Unwritten)
    unheard: frozenset[str] = frozenset()
    epochs: EpochLog = field(default_factory=EpochLog)
    silent: Mapping[int, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)
    audit: deque[AuditRecord] = field(default_factory=lambda: deque(maxlen=MAX_AUDIT))
    watched: WatchedRollout | None = None
    judged: deque[JudgedRollout] = field(default_factory=lambda: deque(maxlen=MAX_JUDGED))
    rolled_back_s: float | None = None
    setbacks: Setbacks = field(default_factory=Setbacks)
    paces: deque[RankPace] = field(default_factory=lambda: deque(maxlen=MAX_PACES))
    slow: Mapping[int, SlowRank] = field(default_factory=dict)
    excluded: dict[str, Exclusion] = field(default_factory=dict)
    quiet_until_s: float = -math.inf
    looked_s: float = -math.inf
    late: deque[DecisionRecord] = field(default_factory=lambda: deque(maxlen=MAX_LATE))
    elsewhere: str = ""
    store_fault: str = ""
    opened_here: bool = False
    must_reconcile: bool = False
    adopting: int | None = None
    is_proposing: bool = False
    postponed: deque[Postponed] = field(default_factory=deque)
    policy_revision: int = 0
    recorded_policy: str = ""
    revision: int = 1

    @classmethod
    def remembered(cls, name: str, *, policies: PolicyBook, memory: PoolMemory) -> "Pool":
        """A pool as the store knew it; nobody is in it yet."""
        tally = Tally()
        in_force = policies.of(name)
        policy = in_force.values
        pool = cls(
            name=name,
            policies=policies,
            in_force=in_force,
            roster=Roster(name),
            layouts=PoolLayouts(next_generation=memory.next_generation),
            rollouts=Rollouts(policy, tally=tally),
            tally=tally,
            bounds=Bounds(policy),
            averages=memory.averages,
            last_decision=memory.last_decision,
            hold=memory.hold,
            audit=deque(memory.audit, maxlen=MAX_AUDIT),
        )
        if memory.last_decision is not None:
            pool.recorded_policy = memory.last_decision.policy_hash
        if memory.membership is not None:
            pool.roster.highest_epoch = memory.membership.epoch
            pool.unheard = frozenset(memory.membership.workers)
        if memory.committed is not None:
            pool.layouts.run(memory.committed)
            pool.layouts.stored_generation = memory.committed.generation
        if memory.proposed is not None:
            pool.layouts.know(memory.proposed)
            pool.layouts.proposed = memory.proposed
        return pool

    @property
    def policy(self) -> Policy:
        """The values in force."""
        return self.in_force.values

    def adopt_policy(self, in_force: PolicyInForce, *, now: float) -> None:
        """Go on under another policy; what is under way keeps the bounds it began with."""
        self.in_force = in_force
        self.rollouts.adopt(in_force.values)
        self.bounds.adopt(in_force.values)
        self.quiet_until_s = -math.inf
        if self.loads is not None:
            self.loads.adopt(in_force.values, now=now)

    @property
    def silent_after_s(self) -> float:
        """Silence that counts. Workers keep the pace they were told until they get a new rank."""
        told_s = max((one.heartbeat_s for one in self.roster.members.values()), default=0.0)
        if told_s <= self.policy.heartbeat_interval_s:
            return self.policy.silent_after_s
        return max(self.policy.silent_after_s, 2 * told_s)

    @property
    def can_plan(self) -> bool:
        """Whether a new layout could be rolled out now."""
        return self._is_settled and not self.store_fault

    @property
    def can_think(self) -> bool:
        """Whether a plan may be made and judged, be it only to be kept in mind."""
        in_memory = self.policy.store_down is StoreDown.MEMORY
        return self._is_settled and (in_memory or not self.store_fault)

    @property
    def _is_settled(self) -> bool:
        return (
            self.roster.complete
            and self.rollouts.current is None
            and not self.must_reconcile
            and not (self.silent or self.faults)
            and self.checksums is not None
            and self.checksums.complete
        )

    def diagnosis(self) -> Diagnosis:
        """How the pool is, in a word and a reason."""
        if self.elsewhere:
            return Diagnosis(health=Health.WAITING, reason=self.elsewhere)
        return diagnose(
            self.roster,
            opening=self.opening,
            silent=self.silent,
            faults=tuple(self.faults.values()),
            store_fault=self.store_fault,
        )

    def begin_epoch(self, *, opened_here: bool, now: float) -> None:
        """Other ranks, or other knowledge of them: what was of the old ones is dropped."""
        shape = self.roster.shape
        assert shape is not None, "an epoch has members"
        if self.loads is not None:
            self.averages = self.loads.records(now=now)
        self.loads = None
        if self.checksums is not None and self.checksums.complete:
            self.verified = self.checksums.table()
        if self.verified is not None and self.verified.shape[:2] != (
            shape.model.num_layers,
            shape.model.num_experts,
        ):
            self.verified = None
        self.rollouts.abandon()
        self.setbacks = Setbacks()
        self.checksums = ChecksumTable(
            num_layers=shape.model.num_layers, num_experts=shape.model.num_experts
        )
        self.faults.clear()
        self.silent = {}
        self.quiet_until_s = -math.inf
        self.watched = None
        self.paces.clear()
        self.slow = {}
        self.moves = {}
        self.opened_here = opened_here
        self.must_reconcile = not opened_here

    def load(self) -> Load:
        """What the slow average says now, float64 [layers, experts] in assignments per second."""
        if self.loads is not None:
            return self.loads.slow.per_second()
        shape = self.roster.shape
        assert shape is not None, "loads are of a model"
        wanted = (shape.model.num_layers, shape.model.num_experts)
        record = self.averages.get(SLOW)
        if record is None or record.decayed_load.shape != wanted or record.weight_s <= 0:
            return np.zeros(wanted)
        return record.decayed_load / record.weight_s

    def merge_checksums(self, member: Member, layout: Layout | None, told: Checksums) -> None:
        """Believe what a rank says it holds, unless another rank said otherwise."""
        if layout is None or self.checksums is None or member.rank is None:
            return
        concern = f"checksums of rank {member.rank}"
        fault = self.checksums.merge(layout, rank=member.rank, checksums=told)
        if fault is None:
            self.faults.pop(concern, None)
            return
        self.faults[concern] = fault
        self.refusals.count("checksum_conflict", fault)

    def hear_bounds(self, worker: str, report: Report) -> None:
        """Add up a worker's waits that reached their bound; a kind that we do not know is named."""
        boot_id, told = report.load.boot_id, report.stats.bounds
        for name in self.bounds.hear(worker, boot_id=boot_id, told=told):
            self.refusals.count("report_bound", f"worker {worker} tells of a bound {name!r}")

    def roll(self, event: Event, *, now: float) -> Chain:
        """Tell the rollout, and carry out what it wants; an abort takes the verdict back."""
        aborted, before = self.rollouts.aborted, self.rollouts.current
        completed = self.rollouts.completed
        effects = self.obey(self.rollouts.handle(event, now=now))
        rollout = self.rollouts.latest
        if before is not None and isinstance(event, DeadlineCheck):
            self.bounds.note_rollout(before, self.rollouts.latest)
        if self.rollouts.completed > completed:
            self.setbacks = Setbacks()
        if self.rollouts.aborted <= aborted or rollout is None:
            return effects
        if isinstance(event, RankRefused | DeadlineCheck):
            self.setbacks = self.setbacks.one_more(rollout.reason, now=now)
        if self.verdict is None:
            return effects
        reason = f"generation {rollout.target.generation} was aborted: {rollout.reason}"
        taken_back = replace(self.verdict, time_unix_s=now, accepted=False, reason=reason)
        return (*effects, WriteDecision(record=taken_back))

    def obey(self, commands: Commands) -> Chain:
        """Carry out commands; a layout is known before anybody is told of it."""
        if not commands:
            return ()
        self.revision += 1
        for command in commands:
            match command:
                case PersistProposed():
                    self.layouts.know(command.layout)
                case PersistCommitted():
                    # All ranks run it: from now on it is what everything starts from.
                    self.layouts.run(command.layout)
        assert self.checksums is not None, "commands are for the ranks of an epoch"
        return orders(
            commands,
            roster=self.roster,
            layouts=self.layouts,
            checksums=self.checksums,
            policy=self.policy,
        )

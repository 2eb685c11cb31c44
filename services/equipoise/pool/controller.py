"""`PoolController`: the life of one pool. Events go in, chains of effects come out.

Events come from workers, the clock, the planner, operators and the store. The controller keeps all
ranks on one layout, measures the load, has plans made and rolls the accepted ones out. Its truth is
what workers report: whatever it missed, it reconciles with the next message.
"""

from equipoise.planning.errors import InvalidReportError
from equipoise.planning.layout import digest_text
from equipoise.planning.proposal import Proposal
from equipoise.planning.rollout import (
    DeadlineCheck,
    Persisted,
    RankRejected,
    RankRuns,
    RankStaged,
    RankSwitched,
)
from equipoise.policy.book import PolicyBook
from equipoise.pool.effects import (
    Chain,
    Effect,
    Propose,
    Send,
    Write,
    WriteAdopted,
    WriteAudit,
    WriteCommitted,
    WriteDecision,
    WriteMembership,
    WriteProposed,
)
from equipoise.pool.member import Member
from equipoise.pool.operations import OperatorRequests
from equipoise.pool.pool import Pool
from equipoise.pool.records import PoolMemory
from equipoise.pool.requests import AdminRequest
from equipoise.wire.balancer_messages import Abort, HeartbeatAck, Rejection
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import (
    GroupLost,
    Heartbeat,
    Hello,
    LayoutRejected,
    Leaving,
    Report,
    Serving,
    Staged,
    Switched,
    WorkerMessage,
)


class PoolController:
    """Decides for one pool. `now` is unix time in seconds that never runs backwards.

    `written` and `write_failed` report the outcome of writes, `proposed` and `proposal_failed` that
    of proposals; each returns effects in turn.
    """

    def __init__(self, name: str, *, policies: PolicyBook, memory: PoolMemory, term: int) -> None:
        self.pool = pool = Pool(name, policies=policies, memory=memory, term=term)
        self._operations = OperatorRequests(
            pool.policy,
            roster=pool.roster,
            layouts=pool.layouts,
            windows=pool.windows,
            rollouts=pool.rollouts,
            journal=pool.journal,
            decisions=pool.decisions,
            diagnosis=pool.diagnosis,
        )

    # Workers ------------------------------------------------------------------------------------

    def hello(self, hello: Hello, *, now: float) -> Chain:
        """A worker opened a stream. The last one that the pool waits for opens an epoch.

        Raises:
            RejectedWorkerError: it cannot be in this pool; nothing changed.
        """
        effects = self.pool.membership.admit(hello, now=now)
        self.pool.note_change()
        return effects

    def message(self, worker: str, value: WorkerMessage, *, now: float) -> Chain:
        """A connected worker sent a message.

        Raises:
            InvalidMessageError, InvalidReportError: it cannot be used; the stream continues.
        """
        pool = self.pool
        member = pool.roster.members[worker]
        member.note_heard(now=now)
        pool.note_change()
        match value:
            case Heartbeat():
                return self._heartbeat(member, value, now=now)
            case Report():
                return self._report(member, value, now=now)
            case Leaving():
                if not value.failed:
                    member.note_stop()
                return self.lost(worker, reason=f"it left: {value.reason}", now=now)
            case GroupLost():
                return pool.membership.lose_group(member, value, now=now)
            case Hello():
                raise InvalidMessageError(
                    "hello_repeated", f"worker {worker} has already connected"
                )
            case _ if value.epoch < pool.roster.epoch or member.is_claiming:
                # Of another epoch; a rank that is taken over reports it again.
                return pool.agreement.note_late(member, value, now=now)
            case _:
                self._check(member, value)
                answer = self._answer(member, value, now=now)
                return (*answer, *pool.membership.settle(now=now))

    def lost(self, worker: str, *, reason: str, now: float) -> Chain:
        """A worker's stream has ended."""
        member = self.pool.roster.members.get(worker)
        if member is None:
            return ()
        self.pool.note_change()
        return self.pool.membership.leave(member, reason=reason, now=now)

    def reject(self, worker: str, *, kind: str, reason: str) -> Chain:
        """Count a rejected message; its worker is sent the reason."""
        self.count_rejection(kind, reason)
        member = self.pool.roster.members.get(worker)
        if member is None or not member.connected:
            return ()
        member.note_rejected(reason)
        return (Send(worker=worker, message=Rejection(reason=reason, fatal=False)),)

    def count_rejection(self, kind: str, reason: str) -> None:
        """Count a rejection."""
        self.pool.note_change()
        self.pool.counters.rejections.count(kind, reason)

    def count_poison(self, gateway: str, num_rejected: int) -> None:
        """A gateway's process reports how many requests it has rejected because ranks failed."""
        self.pool.note_change()
        self.pool.counters.poison.note(gateway, num_rejected)

    # The clock, the planner, operators and the store --------------------------------------------

    def tick(self, *, now: float) -> Chain:
        """Time passed: check every timeout, settle what is open, close a window that is due."""
        pool = self.pool
        before = self._shown()
        effects: list[Effect] = [*pool.membership.write_again(), *self._follow_policy(now=now)]
        effects += pool.journal.late_decisions()
        effects += pool.membership.note_silence(now=now)
        effects += pool.rollouts.handle(DeadlineCheck(), now=now)
        effects += pool.membership.open_by_clock(now=now)
        effects += pool.quarantine_records.record(now=now)
        effects += pool.membership.settle(now=now)
        num_closed = pool.windows.num_closed
        effects += pool.decisions.close_due_window(now=now)
        may_move = pool.rollouts.must_wait(now=now) is None
        if pool.windows.num_closed > num_closed and may_move:
            effects += pool.decisions.keep_to_pin(now=now)
        if effects or self._shown() != before:
            pool.note_change()
        return _plans_first(tuple(effects))

    def administer(self, request: AdminRequest, *, now: float) -> Chain:
        """An operator requests an operation; its audit record follows, and with it the answer."""
        self.pool.note_change()
        return self._operations.administer(request, now=now)

    def proposed(
        self,
        proposal: Proposal,
        *,
        plan_ms: float,
        now: float,
        requested_by: AdminRequest | None = None,
    ) -> Chain:
        """A proposal is ready, which an operator may have requested."""
        self.pool.note_change()
        if requested_by is not None:
            chain = self._operations.planned(requested_by, proposal, plan_ms=plan_ms, now=now)
        else:
            chain = self.pool.decisions.decide(proposal, plan_ms=plan_ms, now=now)
        # Answers to requests that waited for the plan do not wait for the turn of its wave.
        return _plans_first((*self._operations.handle_postponed(now=now), *chain))

    def proposal_failed(
        self,
        reason: str,
        *,
        timed_out: bool,
        now: float,
        requested_by: AdminRequest | None = None,
    ) -> Chain:
        """The planner failed or took too long; the next window tries again."""
        self.pool.note_change()
        if timed_out:
            self.pool.counters.timeouts.note("plan", reason)
        else:
            self.pool.counters.rejections.count("plan", reason)
        answer = self._operations.plan_failed(requested_by, reason, now=now)
        return _plans_first((*answer, *self._operations.handle_postponed(now=now)))

    def written(self, write: Write, *, now: float) -> Chain:
        """The store accepted a write; a record comes back with its number."""
        pool = self.pool
        pool.note_change()
        pool.journal.note_written(write)
        match write:
            case WriteProposed():
                return pool.rollouts.handle(Persisted(generation=write.layout.generation), now=now)
            case WriteCommitted():
                pool.layouts.note_stored(write.generation)
                return pool.rollouts.handle(Persisted(generation=write.generation), now=now)
            case WriteAdopted():
                pool.layouts.end_adoption(stored_generation=write.layout.generation)
            case WriteMembership():
                return pool.membership.note_written(write.members)
            case WriteDecision():
                pool.journal.note_decision(write.record)
            case WriteAudit():
                return self._operations.note_audit(write, now=now)
            case _:
                pass
        return ()

    def write_failed(
        self, write: Write, *, reason: str, timed_out: bool = False, behind: Chain = ()
    ) -> None:
        """The store did not accept a write, so no effect after it was carried out.

        The following ticks try again. `reason` is what is wrong with the store; empty if it works.
        """
        pool, lost = self.pool, (write, *behind)
        pool.note_change()
        if timed_out:
            pool.counters.timeouts.note("store", reason)
        pool.journal.note_failed(lost, reason)
        if any(isinstance(effect, WriteAdopted) for effect in lost):
            pool.layouts.end_adoption(stored_generation=None)
        pool.membership.note_failed(lost)

    def note_stored(self, memory: PoolMemory) -> None:
        """The store has this: less than it had, or requests whose writing seemed to fail.

        What all ranks run is adopted again.
        """
        if self.pool.journal.note_stored(memory):
            self.pool.note_change()
        if self.pool.rollouts.current is None:
            self.pool.layouts.note_read(memory.committed)

    def hand_over(self, elsewhere: str) -> Pool:
        """This balancer no longer leads; `elsewhere` names the balancer that leads the pool now."""
        self.pool.hand_over(elsewhere)
        self.pool.note_change()
        return self.pool

    # What they do -------------------------------------------------------------------------------

    def _shown(self) -> tuple[object, ...]:
        """What a tick can change without an effect."""
        pool = self.pool
        return pool.policy.in_force, pool.membership.opening, tuple(pool.attendance.silent)

    def _follow_policy(self, *, now: float) -> Chain:
        """Put a changed policy in force; averages, windows and a rollout in progress continue."""
        pool = self.pool
        pool.policy.note_phase(pool.roster.phase)
        if not pool.policy.is_stale:
            return ()
        pool.note_change()
        change = pool.policy.follow()
        pool.counters.timeouts.adopt(pool.policy.values)
        pool.attendance.look_again()
        pool.windows.adopt_policy(now=now)
        return pool.decisions.record_policy(change, now=now) if change else ()

    def _heartbeat(self, member: Member, heartbeat: Heartbeat, *, now: float) -> Chain:
        ack = Send(worker=member.name, message=HeartbeatAck(sequence=heartbeat.sequence))
        rollouts = self.pool.rollouts
        member.note_heartbeat(heartbeat, now=now)
        if member.rank is None or heartbeat.epoch != self.pool.roster.epoch:
            return (ack,)
        effects: Chain = ()
        self.pool.agreement.note_weights(member)
        runs_ours = self.pool.agreement.note_running(member, heartbeat)
        if runs_ours and rollouts.current is not None and rollouts.current.awaits_reports:
            runs = RankRuns(rank=member.rank, running=heartbeat.generation)
            effects = rollouts.handle(runs, now=now)
        return (ack, *effects, *self._drop_stray(member))

    def _report(self, member: Member, report: Report, *, now: float) -> Chain:
        load, pool = report.load, self.pool
        if load.epoch < pool.roster.epoch or member.is_claiming:
            return ()  # Counters belong to one epoch.
        if member.rank is None or load.rank != member.rank:
            rank = "none yet" if member.rank is None else member.rank
            raise InvalidReportError(
                "report_unknown_rank",
                f"worker {member.name} reports as rank {load.rank}, but its rank is {rank}",
            )
        if load.phase is not member.hello.phase:
            raise InvalidReportError(
                "report_phase",
                f"worker {member.name} reports {load.phase} load, but it serves "
                f"{member.hello.phase}: restart it",
            )
        member.note_stats(report.stats)
        pool.counters.note_report(member.name, report)
        layout = pool.layouts.nearest(load.generation)
        # A rank repeats the last counters of the generation before; a balancer that has started
        # since has no use for them.
        is_repeated = layout is not None and load.generation < min(
            member.generation, layout.generation
        )
        if layout is not None and not is_repeated:
            pool.windows.accept(report, layout, now=now)
        return ()

    def _check(self, member: Member, value: Serving | Staged | LayoutRejected | Switched) -> None:
        """Check epoch, rank, generation and layout of a message.

        Raises:
            InvalidMessageError: one of them is wrong.
        """
        what, roster = type(value).__name__.lower(), self.pool.roster
        layouts, newest = self.pool.layouts, self.pool.layouts.next_generation - 1
        is_news = isinstance(value, Serving) or (
            isinstance(value, Switched) and value.generation > member.generation
        )
        if value.epoch != roster.epoch or member.rank is None:
            fault, kind = f"epoch {value.epoch}, but the current epoch is {roster.epoch}", "epoch"
        elif value.rank != member.rank:
            fault, kind = f"rank {value.rank}, but its rank is {member.rank}", "rank"
        elif value.generation > newest:
            fault = f"generation {value.generation}, but the newest is {newest}"
            kind = "generation"
        elif is_news and not self.pool.agreement.may_run(value.generation):
            ours = layouts.current.generation if layouts.current is not None else "none"
            fault = f"generation {value.generation}, but the pool runs generation {ours}"
            kind = "generation"
        elif fault := self._other_layout(value):
            kind = "layout"
        else:
            return
        raise InvalidMessageError(f"{what}_{kind}", f"worker {member.name} reports {fault}")

    def _other_layout(self, value: Serving | Staged | LayoutRejected | Switched) -> str:
        """What another layout than ours a message is about, if it is."""
        layout = self.pool.layouts.get(value.generation)
        if isinstance(value, LayoutRejected) or layout is None:
            return ""
        if value.layout_digest in {b"", layout.digest()}:
            return ""
        return (
            f"generation {value.generation} as layout {digest_text(value.layout_digest)}, which is "
            f"{digest_text(layout.digest())}: restart it"
        )

    def _answer(
        self, member: Member, value: Serving | Staged | LayoutRejected | Switched, *, now: float
    ) -> Chain:
        pool, rank, generation = self.pool, value.rank, value.generation
        layout = pool.layouts.get(generation)
        match value:
            case Serving():
                member.note_serving(value, layout)
                pool.agreement.note_joining(rank, rejected="")
                return pool.agreement.note_bytes(member, layout, value, now=now)
            case Staged():
                member.note_staged(generation)
                pool.counters.tally.note_staged(value)
                staged = RankStaged(rank=rank, generation=generation)
                return (*pool.rollouts.handle(staged, now=now), *self._drop_stray(member))
            case LayoutRejected() if value.highest_epoch:
                return pool.membership.reject_epoch(member, value, now=now)
            case LayoutRejected():
                if not member.serving:
                    pool.agreement.note_joining(rank, rejected=value.reason)
                rejected = RankRejected(rank=rank, generation=generation, reason=value.reason)
                return pool.rollouts.handle(rejected, now=now)
            case Switched():
                pool.rollouts.note_switch(value, now=now)
                pool.agreement.note_switch(member, value)
                if generation < member.generation:
                    return ()  # Generations only grow: the rank runs a later one by now.
                member.note_switched(generation, layout)
                found = pool.agreement.note_bytes(member, layout, value, now=now)
                switched = RankSwitched(
                    rank=rank, generation=generation, step=value.step, stall_us=value.stall_us
                )
                return (*found, *pool.rollouts.handle(switched, now=now))

    def _drop_stray(self, member: Member) -> Chain:
        """Abort what a rank has staged if that is not being rolled out."""
        staged, rolling = member.staged_generation, self.pool.rollouts.current
        if not staged or self.pool.agreement.must_reconcile:
            return ()
        if rolling is not None and rolling.target.generation == staged:
            return ()
        reason = f"generation {staged} is not being rolled out"
        abort = Abort(epoch=self.pool.roster.epoch, generation=staged, reason=reason)
        return (Send(worker=member.name, message=abort),)


def _plans_first(chain: Chain) -> Chain:
    """Move plans to the front: they depend on no write, so a failed one must not prevent them."""
    plans = tuple(effect for effect in chain if isinstance(effect, Propose))
    return (*plans, *(effect for effect in chain if not isinstance(effect, Propose)))

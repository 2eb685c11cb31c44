"""`PoolController`: one pool's whole life, without sockets and without a clock.

What workers, the clock, the planner and the store say goes in; chains of effects come out. It keeps
all ranks on one layout, learns the load, has plans made and rolls the accepted ones out. Its truth
is what workers report: whatever it missed, it reconciles with the next word it hears.
"""

import math

from equipoise.planning.errors import InvalidReportError
from equipoise.planning.policy import StoreDown
from equipoise.planning.proposal import Proposal
from equipoise.planning.rollout import (
    DeadlineCheck,
    Persisted,
    RankLost,
    RankRefused,
    RankStaged,
    RankSwitched,
)
from equipoise.policy.book import PolicyBook
from equipoise.pool.decisions import close_due_window, decide, late_decisions
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
from equipoise.pool.epoch_log import Unwritten
from equipoise.pool.hello_checks import check_numbers, check_running_layout
from equipoise.pool.members import Member
from equipoise.pool.opening import assign_returned, open_by_clock, open_by_hello, open_if_due, retry
from equipoise.pool.operations import (
    administer,
    held,
    judged,
    keep_to_pin,
    not_planned,
    resume_postponed,
)
from equipoise.pool.policy_change import follow_policy
from equipoise.pool.pool import Pool
from equipoise.pool.records import PoolMemory
from equipoise.pool.requests import AdminRequest, Preview
from equipoise.pool.settling import settle
from equipoise.pool.silence import note_silence
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import (
    Abort,
    GroupLost,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leaving,
    Refused,
    Rejection,
    Report,
    Serving,
    Staged,
    Switched,
    WorkerMessage,
)


class PoolController:
    """Decides for one pool. `now` is unix time in seconds that never runs backwards.

    Writes are reported back by `written` or `write_failed`, proposals by `proposed` or
    `proposal_failed`; each may want something in turn.
    """

    def __init__(self, name: str, *, policies: PolicyBook, memory: PoolMemory) -> None:
        self.pool = Pool.remembered(name, policies=policies, memory=memory)

    # What workers say ----------------------------------------------------------------------------

    def hello(self, hello: Hello, *, now: float) -> Chain:
        """A worker opened a stream. The last one that is waited for opens an epoch.

        Raises:
            RefusedWorkerError: it cannot be in this pool; nothing changed.
        """
        pool = self.pool
        check_numbers(pool, hello)
        check_running_layout(pool, hello)
        epoch = pool.roster.epoch
        before = pool.roster.members.get(hello.worker)
        member = pool.roster.admit(hello, now=now)
        pool.revision += 1
        effects: list[Effect] = []
        pool.unheard -= {hello.worker}
        pool.quiet_until_s = -math.inf
        if before is not None and before.rank is not None and member.rank is None:
            restarted = f"worker {member.name} restarted"
            effects += pool.roll(RankLost(rank=before.rank, reason=restarted), now=now)
        if hello.running is not None:
            if pool.roster.epoch != epoch:
                pool.begin_epoch(opened_here=False, now=now)
            pool.layouts.know(hello.running.layout)
            pool.layouts.reserve(hello.running.staged_generation)
            pool.merge_checksums(member, hello.running.layout, hello.running.checksums)
        if hello.group_lost is not None:
            # Whoever comes later may have staged one more.
            pool.layouts.reserve(hello.group_lost.generation + 1)
        effects += open_by_hello(pool, hello, now=now)
        return (*effects, *assign_returned(pool), *settle(pool, now=now))

    def message(self, worker: str, value: WorkerMessage, *, now: float) -> Chain:
        """A worker that is in said something.

        Raises:
            InvalidMessageError, InvalidReportError: it cannot be used; the rest goes on.
        """
        member = self.pool.roster.members[worker]
        member.last_heard_s = now
        self.pool.revision += 1
        match value:
            case Heartbeat():
                return self._heartbeat(member, value)
            case Report():
                return self._report(member, value, now=now)
            case Leaving():
                return self.lost(worker, reason=f"it left: {value.reason}", now=now)
            case GroupLost():
                return self._lose_group(member, value, now=now)
            case Hello():
                raise InvalidMessageError("hello_repeated", f"worker {worker} is in already")
            case _ if value.epoch < self.pool.roster.epoch:
                return ()  # It was said before the worker heard of the present epoch.
            case _:
                self._check_seat(member, value)
                answer = self._answer(member, value, now=now)
                return (*answer, *settle(self.pool, now=now))

    def lost(self, worker: str, *, reason: str, now: float) -> Chain:
        """A worker's stream has ended."""
        member = self.pool.roster.members.get(worker)
        if member is None:
            return ()
        self.pool.revision += 1
        self.pool.quiet_until_s = -math.inf
        rank = member.rank if member.connected else None
        self.pool.roster.leave(worker, reason=reason)
        effects: Chain = ()
        if rank is not None:
            effects = self.pool.roll(RankLost(rank=rank, reason=reason), now=now)
        return (*effects, *open_if_due(self.pool, now=now))

    def refuse(self, worker: str, *, kind: str, reason: str, now: float) -> Chain:
        """Count a message or a worker that was refused; who is in is told, and lives on."""
        self.pool.revision += 1
        self.pool.refusals.count(kind, reason)
        member = self.pool.roster.members.get(worker)
        if member is None or not member.connected:
            return ()
        member.last_heard_s = now
        return (Send(worker=worker, message=Rejection(reason=reason, fatal=False)),)

    # What the clock, the planner and the store say -----------------------------------------------

    def tick(self, *, now: float) -> Chain:
        """Time passed: look at every bound, settle what is open, close a window that is due."""
        effects: list[Effect] = [*retry(self.pool), *follow_policy(self.pool, now=now)]
        effects += late_decisions(self.pool)
        effects += note_silence(self.pool, now=now)
        effects += self.pool.roll(DeadlineCheck(), now=now)
        effects += open_by_clock(self.pool, now=now)
        effects += settle(self.pool, now=now)
        closed = self.pool.windows_closed
        effects += close_due_window(self.pool, now=now)
        is_early = self.pool.setbacks.wait(self.pool.policy, now=now)
        if self.pool.windows_closed > closed and not (self.pool.hold.paused or is_early):
            effects += keep_to_pin(self.pool, now=now)
        return _plans_first(tuple(effects))

    def administer(self, request: AdminRequest, *, now: float) -> Chain:
        """An operator wants something; the answer is in the audit that follows from it."""
        self.pool.revision += 1
        return administer(self.pool, request, now=now)

    def proposed(
        self, proposal: Proposal, *, plan_ms: float, now: float, asked: AdminRequest | None = None
    ) -> Chain:
        """A proposal is ready, which an operator may have `asked` for."""
        if asked is not None:
            chain = judged(self.pool, asked, proposal, plan_ms=plan_ms, now=now)
        else:
            chain = decide(self.pool, proposal, plan_ms=plan_ms, now=now)
        return _plans_first((*chain, *resume_postponed(self.pool, now=now)))

    def proposal_failed(
        self,
        reason: str,
        *,
        timed_out: bool,
        now: float,
        asked: AdminRequest | None = None,
    ) -> Chain:
        """The planner broke down or took too long; the next window tries again."""
        self.pool.revision += 1
        if timed_out:
            self.pool.bounds.note("plan", reason)
        else:
            self.pool.refusals.count("plan", reason)
        if asked is None or not isinstance(asked.wish, Preview):
            self.pool.is_proposing = False
        answer = () if asked is None else not_planned(asked, reason=reason, now=now)
        return _plans_first((*answer, *resume_postponed(self.pool, now=now)))

    def written(self, write: Write, *, now: float) -> Chain:
        """The store holds a write; a decision comes back with its number."""
        pool = self.pool
        pool.revision += 1
        pool.store_fault = ""
        match write:
            case WriteProposed():
                return pool.roll(Persisted(generation=write.layout.generation), now=now)
            case WriteCommitted():
                pool.layouts.stored_generation = write.generation
                return pool.roll(Persisted(generation=write.generation), now=now)
            case WriteAdopted():
                pool.layouts.stored_generation = write.layout.generation
                pool.adopting = None
            case WriteMembership() if write.membership.epoch == pool.roster.epoch:
                pool.unwritten = Unwritten()
                return assign_returned(pool)
            case WriteDecision():
                pool.last_decision = write.record
            case WriteAudit():
                return held(pool, write, now=now)
            case _:
                pass
        return ()

    def write_failed(
        self, write: Write, *, reason: str, timed_out: bool = False, behind: Chain = ()
    ) -> None:
        """The store did not take a write, so nothing `behind` it was done; ticks try again."""
        pool = self.pool
        pool.revision += 1
        if timed_out:
            pool.bounds.note("store", reason)
        goes_on = pool.policy.store_down is StoreDown.MEMORY
        pool.store_fault = (
            f"{reason}; nothing is switched until the store works, planning "
            f"{'goes on in memory' if goes_on else 'is paused'}"
        )
        for effect in (write, *behind):
            if isinstance(effect, WriteDecision):
                pool.last_decision = effect.record
                pool.late.append(effect.record)
            if isinstance(effect, WriteAdopted):
                pool.adopting = None
            if any(effect is one for one in pool.unwritten.chain):
                pool.unwritten.failed = True

    # Membership ----------------------------------------------------------------------------------

    def _lose_group(self, member: Member, lost: GroupLost, *, now: float) -> Chain:
        """Ranks cannot step together any more; what was rolled out to them is over."""
        pool = self.pool
        if lost.epoch < pool.roster.epoch and member.rank is not None:
            return ()  # It has a rank in a later epoch and will hear of it.
        opened_s = next((record.opened_s for record in pool.epochs.newest_first()), now)
        is_first = all(one.lost_reason is None for one in pool.roster.seated())
        if pool.loads is None and is_first and now - opened_s >= pool.policy.meet_timeout_s:
            pool.bounds.note("meet", f"epoch {lost.epoch} was given up: {lost.reason}")
        member.lose_group(lost, now=now)
        effects: Chain = ()
        if member.rank is not None:
            reason = f"its group is over: {lost.reason}"
            effects = pool.roll(RankLost(rank=member.rank, reason=reason), now=now)
        return (*effects, *open_if_due(pool, now=now))

    # Messages ------------------------------------------------------------------------------------

    def _heartbeat(self, member: Member, heartbeat: Heartbeat) -> Chain:
        ack = Send(worker=member.name, message=HeartbeatAck(sequence=heartbeat.sequence))
        if member.draining != heartbeat.draining:
            member.draining = heartbeat.draining
            self.pool.revision += 1
        if member.rank is None or heartbeat.epoch != self.pool.roster.epoch:
            return (ack,)
        member.generation = heartbeat.generation
        member.staged_generation = heartbeat.staged_generation
        return (ack, *self._drop_stray(member))

    def _report(self, member: Member, report: Report, *, now: float) -> Chain:
        if report.load.epoch < self.pool.roster.epoch:
            return ()  # Counters are of one epoch; these rest with it.
        if member.rank is None or report.load.rank != member.rank:
            raise InvalidReportError(
                "report_unknown_rank",
                f"worker {member.name} reports as rank {report.load.rank}, but its rank is "
                f"{'not dealt yet' if member.rank is None else member.rank}",
            )
        member.stats = report.stats
        self.pool.hear_bounds(member.name, report)
        layout = self.pool.layouts.nearest(report.load.generation)
        if self.pool.loads is None or layout is None:
            # Before all ranks serve nothing is lost: counters are cumulative.
            return ()
        if (
            report.load.generation < member.generation
            and layout.generation > report.load.generation
        ):
            # A rank repeats the last counters of the generation before; a balancer that was
            # started since has no use for them.
            return ()
        self.pool.loads.accept(report, layout, now=now)
        return ()

    def _check_seat(self, member: Member, value: Serving | Staged | Refused | Switched) -> None:
        what = type(value).__name__.lower()
        if value.epoch != self.pool.roster.epoch or member.rank is None:
            raise InvalidMessageError(
                f"{what}_epoch",
                f"worker {member.name} speaks of epoch {value.epoch}, but pool {self.pool.name} is "
                f"in epoch {self.pool.roster.epoch}",
            )
        if value.rank != member.rank:
            raise InvalidMessageError(
                f"{what}_rank",
                f"worker {member.name} speaks as rank {value.rank}, but its rank is {member.rank}",
            )
        newest = self.pool.layouts.next_generation - 1
        if value.generation > newest:
            raise InvalidMessageError(
                f"{what}_generation",
                f"worker {member.name} speaks of generation {value.generation}, but the newest is "
                f"{newest}",
            )

    def _answer(
        self, member: Member, value: Serving | Staged | Refused | Switched, *, now: float
    ) -> Chain:
        pool, rank, generation = self.pool, value.rank, value.generation
        refusal = f"answer of rank {rank} to its JoinEpoch"
        match value:
            case Serving():
                member.generation, member.serving, member.steps = generation, True, value.steps
                member.hold(pool.layouts.get(generation))
                pool.faults.pop(refusal, None)
                pool.merge_checksums(member, pool.layouts.get(generation), value.checksums)
                return ()
            case Staged():
                member.staged_generation = generation
                pool.tally.pulled(value)
                noted = pool.roll(RankStaged(rank=rank, generation=generation), now=now)
                return (*noted, *self._drop_stray(member))
            case Refused():
                if not member.serving:
                    pool.faults[refusal] = f"rank {rank} refused its JoinEpoch: {value.reason}"
                return pool.roll(
                    RankRefused(rank=rank, generation=generation, reason=value.reason), now=now
                )
            case Switched():
                member.generation, member.staged_generation = generation, 0
                member.hold(pool.layouts.get(generation))
                pool.merge_checksums(member, pool.layouts.get(generation), value.checksums)
                switched = RankSwitched(
                    rank=rank, generation=generation, step=value.step, stall_us=value.stall_us
                )
                pool.rollouts.note_switch(value, now=now)
                return pool.roll(switched, now=now)

    def _drop_stray(self, member: Member) -> Chain:
        """What a rank has staged and nobody rolls out is dropped."""
        staged, rolling = member.staged_generation, self.pool.rollouts.current
        if not staged or self.pool.must_reconcile:
            return ()
        if rolling is not None and rolling.target.generation == staged:
            return ()
        reason = f"generation {staged} is not being rolled out"
        abort = Abort(epoch=self.pool.roster.epoch, generation=staged, reason=reason)
        return (Send(worker=member.name, message=abort),)


def _plans_first(chain: Chain) -> Chain:
    """A plan rests on no write, so one that fails must not keep it from being made."""
    plans = tuple(effect for effect in chain if isinstance(effect, Propose))
    return (*plans, *(effect for effect in chain if not isinstance(effect, Propose)))

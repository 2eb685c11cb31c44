"""`Membership`: the epochs of a pool, from who is connected to who has which rank in which layout.

`planning/membership.py` decides when ranks are assigned, `planning/recovery.py` in which layout. No
rank is sent an epoch before the store has recorded it.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from equipoise.planning.layout import Layout
from equipoise.planning.membership import EpochDecision, next_epoch
from equipoise.planning.moves import Move
from equipoise.planning.recovery import recover, recovery_moves
from equipoise.planning.resumption import GroupChoice
from equipoise.planning.rollout import RankLost
from equipoise.pool.agreement import Agreement
from equipoise.pool.attendance import Attendance
from equipoise.pool.counters import Counters
from equipoise.pool.effects import Chain, Effect, Log, Send, WriteAdopted, WriteMembership
from equipoise.pool.epochs import EpochHistory, EpochRecord, UnwrittenEpoch
from equipoise.pool.hello_checks import UsedNumbers
from equipoise.pool.interruptions import Interruptions
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.number_claims import NumberClaims
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.quarantine import Quarantine
from equipoise.pool.records import EpochMembers
from equipoise.pool.resumption import Resumption
from equipoise.pool.rollouts import Rollouts
from equipoise.pool.verification import Verification
from equipoise.pool.windows import Windows
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import GroupLost, Hello, LayoutRejected

FIRST_LOOK_S = 1.0
"""Seconds between two looks at a pool that waits for its first ranks. The last Hello that it waits
for is acted on at once; ticks only update the displayed reason and end waits of minutes."""


class Membership:
    """Decides about one pool's epochs in a term; `recorded` is the latest one in the store."""

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        roster: Roster,
        attendance: Attendance,
        interruptions: Interruptions,
        quarantine: Quarantine,
        agreement: Agreement,
        layouts: PoolLayouts,
        verification: Verification,
        windows: Windows,
        rollouts: Rollouts,
        counters: Counters,
        recorded: EpochMembers | None,
        term: int,
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._attendance = attendance
        self._interruptions = interruptions
        self._quarantine = quarantine
        self._agreement = agreement
        self._layouts = layouts
        self._verification = verification
        self._windows = windows
        self._rollouts = rollouts
        self._timeouts = counters.timeouts
        self._numbers = NumberClaims(roster=roster, layouts=layouts, term=term)
        self._resumption = Resumption(
            policy,
            roster=roster,
            layouts=layouts,
            agreement=agreement,
            counters=counters,
            recorded=recorded,
        )
        # Workers that only the store knows so far.
        self._unheard = frozenset(recorded.workers if recorded is not None else ())
        self.opening = EpochDecision()
        """The latest decision about the next epoch."""
        self._history = EpochHistory()
        self._unwritten = UnwrittenEpoch()
        # Copies that bring each rank to the first layout of the epoch.
        self._moves: Mapping[int, tuple[Move, ...]] = {}
        self._is_serving_noted = False
        self._looked_s = -math.inf

    @property
    def epochs(self) -> Sequence[EpochRecord]:
        """The latest epochs that this balancer opened, newest first."""
        return self._history.records

    # Workers ------------------------------------------------------------------------------------

    def admit(self, hello: Hello, *, now: float) -> Chain:
        """Let a worker in. The last one that the pool waits for opens an epoch.

        Raises:
            RejectedWorkerError: it cannot be in this pool; nothing changed.
        """
        used = UsedNumbers.in_hello(hello)
        self._numbers.check_hello(hello.worker, used, now=now)
        self._resumption.check(hello)
        before = self._roster.members.get(hello.worker)
        member = self._roster.admit(hello, now=now)
        clock_s = int(now) if hello.engine else 0
        effects: list[Effect] = [*self._numbers.reserve(hello.worker, used, clock_s=clock_s)]
        effects += self._quarantine.note_hello(hello)
        self._unheard -= {hello.worker}
        self._attendance.look_again()
        if before is not None and before.rank is not None and member.rank is None:
            restarted = f"worker {member.name} restarted"
            effects += self._rollouts.handle(RankLost(rank=before.rank, reason=restarted), now=now)
        if member.serving and hello.running is not None:
            effects += self._resumption.note_running(member, hello.running, now=now)
        if hello.group_lost is not None:
            # A worker that reconnects later may have staged one more.
            self._layouts.reserve(hello.group_lost.generation + 1)
        if member.rank is not None and member.lost_reason is not None:
            self._interruptions.note_end(member, lost=hello.group_lost, now=now)
        elif member.rank is None and hello.group_lost is not None:
            self._interruptions.note_left_out(member, hello.group_lost)
        effects += self._open_after(hello, now=now)
        return (*effects, *self._join_returned(), *self.settle(now=now))

    def leave(self, member: Member, *, reason: str, now: float) -> Chain:
        """A worker's stream has ended."""
        self._attendance.look_again()
        self._quarantine.look_again()
        rank = member.rank if member.connected else None
        self._roster.leave(member.name, reason=reason)
        effects: Chain = ()
        if rank is not None:
            effects = self._rollouts.handle(RankLost(rank=rank, reason=reason), now=now)
        return (*effects, *self._open_if_due(now=now))

    def reject_epoch(self, member: Member, rejected: LayoutRejected, *, now: float) -> Chain:
        """A worker has taken up another epoch than that which it was sent: it needs a later one.

        Raises:
            InvalidMessageError: that epoch is out of reach.
        """
        assert member.rank is not None, "only a rank rejects an epoch"
        used = UsedNumbers(epoch=rejected.highest_epoch)
        warning = self._numbers.count(member.name, used, kind="rejected", now=now)
        member.reject_epoch(rejected.highest_epoch)
        self._interruptions.note_end(member, lost=None, now=now)
        reason = f"it has already taken up epoch {rejected.highest_epoch}"
        effects = self._rollouts.handle(RankLost(rank=member.rank, reason=reason), now=now)
        return (*warning, *effects, *self._open_if_due(now=now))

    def lose_group(self, member: Member, lost: GroupLost, *, now: float) -> Chain:
        """A rank can no longer step with the others; the rollout in progress ends.

        Raises:
            InvalidMessageError: its numbers are out of reach.
        """
        used = UsedNumbers(epoch=lost.epoch, generation=lost.generation)
        warning = self._numbers.count(member.name, used, kind="group_lost", now=now)
        if lost.epoch < self._roster.epoch and member.rank is not None:
            return warning  # It has a rank in a later epoch, which it will be sent.
        is_first = all(one.lost_reason is None for one in self._roster.seated())
        policy, waited_s = self._policy.values, self._history.since_opened_s(now=now)
        if self._windows.loads is None and is_first and waited_s >= policy.meet_timeout_s:
            name = "join" if waited_s >= policy.join_timeout_s else "meet"
            self._timeouts.note(name, f"epoch {lost.epoch} was abandoned: {lost.reason}")
        member.lose_group(lost, now=now)
        self._quarantine.look_again()
        effects: Chain = ()
        if member.rank is not None:
            self._interruptions.note_end(member, lost=lost, now=now)
            reason = f"its group ended: {lost.reason}"
            effects = self._rollouts.handle(RankLost(rank=member.rank, reason=reason), now=now)
        else:
            self._interruptions.note_left_out(member, lost)
        return (*warning, *effects, *self._open_if_due(now=now))

    # The clock and the store --------------------------------------------------------------------

    def note_silence(self, *, now: float) -> Chain:
        """Ranks that fall silent are lost to a rollout."""
        lost = self._attendance.note_silence(now=now)
        return tuple(effect for rank in lost for effect in self._rollouts.handle(rank, now=now))

    def open_by_clock(self, *, now: float) -> Chain:
        """Open an epoch if it is due; a pool that never opened one is looked at less often."""
        if not self._roster.epoch and now < self._looked_s + FIRST_LOOK_S:
            return ()
        self._looked_s = now
        return self._open_if_due(now=now)

    def settle(self, *, now: float) -> Chain:
        """Take what all ranks report to run as the truth; it runs after every message and tick."""
        effects = self._agreement.settle(now=now)
        if self._windows.loads is not None and not self._is_serving_noted:
            self._is_serving_noted = True
            self._history.note_serving(self._roster.epoch, now=now)
            self._interruptions.note_serving(now=now)
        return effects

    def note_written(self, members: EpochMembers) -> Chain:
        """The store has recorded an epoch's members."""
        self._roster.note_recorded(members.epoch)
        if members.epoch != self._roster.epoch:
            return ()
        self._unwritten.begin(())
        return self._join_returned()

    def note_failed(self, lost: Chain) -> None:
        """The store did not accept a write; `lost` are that and what depended on it."""
        self._unwritten.note_failed(lost)

    def write_again(self) -> Chain:
        """What opens the epoch, once more, if the store did not accept it."""
        return self._unwritten.again()

    # Epochs -------------------------------------------------------------------------------------

    def _open_after(self, hello: Hello, *, now: float) -> Chain:
        """Open an epoch if it is due now that a worker said Hello.

        Of the workers that a new pool waits for, hundreds perhaps, only the first and the last
        make it look.
        """
        is_new = not self._roster.epoch and not self._unheard
        brings_something = hello.running is not None or hello.group_lost is not None
        num_here = len(self._roster.members)
        if is_new and not brings_something and 1 < num_here < self._roster.intended_ranks:
            return ()
        return self._open_if_due(now=now)

    def _open_if_due(self, *, now: float) -> Chain:
        """Assign ranks again if it is time; else note what the pool waits for.

        Level-triggered: it runs after every change of membership and every tick.
        """
        silent = self._attendance.silent_workers(now=now)
        excluded = {
            **self._attendance.excluded_workers(now=now),
            **self._interruptions.excluded_workers(now=now),
        }
        effects = self._quarantine.follow_majority(now=now)
        open_points = (silent, excluded, self._quarantine.workers, self._unheard)
        if self._roster.settled and not any((*open_points, self.opening.reason)):
            return ()  # The usual case, at every tick of every pool: there is nothing to decide.
        choice = self._resumption.choose(now=now)
        if choice is not None and choice.is_waiting:
            self.opening = EpochDecision(reason=choice.reason)
            return effects
        if choice is not None:
            effects = (*effects, *self._take_over(choice, now=now))
        shape, quarantined = self._roster.shape, self._quarantine.reasons
        if shape is None:
            return effects
        self.opening = opening = next_epoch(
            self._roster.candidates(silent, excluded=excluded, quarantined=quarantined),
            num_ranks=self._roster.intended_ranks,
            needs=self._roster.needs,
            unheard=self._unheard,
            is_on_record=self._resumption.is_on_record,
            engine=shape.engine,
            is_rolling_out=self._rollouts.current is not None,
            policy=self._policy.values,
            now=now,
        )
        if opening.is_down:
            effects = (
                *effects,
                *(self._attendance.recall_excluded() or self._interruptions.recall()),
            )
        if opening.workers:
            effects = (*effects, *self._open_or_wait(opening, shape, silent=silent, now=now))
        return effects

    def _open_or_wait(
        self, opening: EpochDecision, shape: Hello, *, silent: Container[str], now: float
    ) -> Chain:
        """Open an epoch that is due, unless those before failed; without whom these blame."""
        is_hanging = bool(opening.timeout) and not opening.is_disputed
        found = self._interruptions.judge(silent=silent, is_hanging=is_hanging, now=now)
        if found and not self._interruptions.excluded.keys().isdisjoint(opening.workers):
            return (*found, *self._open_if_due(now=now))
        waits = "" if opening.is_disputed else self._interruptions.wait(now=now)
        if waits:
            self.opening = EpochDecision(reason=waits)
            return found
        return (*found, *self._open(opening, shape, now=now))

    def _take_over(self, choice: GroupChoice, *, now: float) -> Chain:
        """Ranks run an epoch that this balancer did not open, and now count."""
        if choice.is_new_group:
            self._begin_epoch(opened_here=False, now=now)
            self._unwritten.begin(())
        effects = self._resumption.take_over(choice, now=now)
        if choice.is_new_group and self._roster.num_ranks < self._roster.intended_ranks:
            # Absent workers may be in a later epoch, with generations that nobody here knows.
            self._numbers.skip([claim.worker for claim in choice.ranks])
        self._quarantine.look_again()
        return (*effects, *self._quarantine.follow_majority(now=now), *self._join_returned())

    def _open(self, opening: EpochDecision, shape: Hello, *, now: float) -> Chain:
        roster, layouts = self._roster, self._layouts
        self._interruptions.begin_epoch(now=now)
        load = self._windows.average_load(shape.model)
        # No rank was sent an epoch that is not recorded yet, so none has to let go of it.
        is_known = not self._unwritten.is_pending
        left_out = f"it is not part of the next epoch: {opening.reason}" if is_known else None
        # Only a pool that is new and complete has no absent ranks that may know of other numbers.
        is_new = not roster.highest_epoch and len(opening.workers) >= roster.intended_ranks
        skips = roster.latest is None and not is_new
        if skips:
            self._numbers.skip(opening.workers)
        roster.open_epoch(
            frozenset(opening.workers),
            no_hosts=self._interruptions.failed_hosts,
            left_out=left_out,
            now=now,
        )
        topology, seated = roster.topology(), roster.seated()
        held = [member.held for member in seated]
        layout = recover(
            held,
            load=load,
            model=shape.model,
            topology=topology,
            committed=layouts.current,
            generation=layouts.next_generation,
        )
        if skips:  # The number of the committed one may mean another layout to absent ranks.
            layout = replace(layout, generation=layouts.next_generation)
        layouts.run(layout)
        self._begin_epoch(opened_here=True, now=now)
        checksums = self._verification.table
        if checksums is not None and any(table is not None for table in held):
            self._moves = recovery_moves(
                held, target=layout, topology=topology, checksums=checksums
            )
        log = self._note_opened(opening, now=now)
        effects: list[Effect] = []
        if layout.generation != layouts.stored_generation:
            effects.append(WriteAdopted(layout=layout))
            layouts.begin_adoption(layout.generation)
        effects.append(WriteMembership(members=self._roster.epoch_members()))
        effects += [self._join(member) for member in seated]
        self._unwritten.begin(tuple(effects))
        return (log, *effects)

    def _note_opened(self, opening: EpochDecision, *, now: float) -> Log:
        members = self._roster.epoch_members()
        if opening.timeout:
            self._timeouts.note(opening.timeout, opening.reason)
        self._history.note_opened(members, reason=opening.reason, now=now)
        self.opening, self._unheard = EpochDecision(), frozenset()
        return Log(
            text=f"epoch {members.epoch} opens with {len(members.workers)} ranks: {opening.reason}",
            epoch=members.epoch,
        )

    def _begin_epoch(self, *, opened_here: bool, now: float) -> None:
        """Drop what is about the ranks of the epoch before."""
        self._windows.begin_epoch(now=now)
        self._rollouts.begin_epoch()
        self._attendance.begin_epoch()
        self._agreement.begin_epoch(opened_here=opened_here)
        self._quarantine.look_again()
        self._moves, self._is_serving_noted = {}, False

    def _join_returned(self) -> Chain:
        """Send ranks that reconnected the list of peers, once all are known and recorded."""
        if self._unwritten.is_pending or not self._roster.peers:
            return ()
        return tuple(
            self._join(member)
            for member in self._roster.seated()
            if member.connected
            and not member.joined
            and member.lost_reason is None
            and self._layout_of(member) is not None
        )

    def _layout_of(self, member: Member) -> Layout | None:
        """What a rank runs or is to start in; None until all ranks have reported what they run."""
        return self._layouts.get(member.generation) or self._layouts.current

    def _join(self, member: Member) -> Send:
        """Send a worker its rank, its peers and the layout that it runs or is to start in."""
        assert member.rank is not None, "only a rank joins"
        policy, roster = self._policy.values, self._roster
        layout = self._layout_of(member)
        assert layout is not None, "an epoch that opens has a layout"
        member.note_joined(heartbeat_s=policy.heartbeat_interval_s)
        join = JoinEpoch(
            epoch=roster.epoch,
            rank=member.rank,
            peers=roster.peers,
            rendezvous_address=roster.rendezvous_address,
            layout=layout,
            report_interval_s=policy.report_interval_s,
            heartbeat_interval_s=policy.heartbeat_interval_s,
            moves=() if member.serving else self._moves.get(member.rank, ()),
            meet_timeout_s=policy.meet_timeout_s,
            join_timeout_s=policy.join_timeout_s,
        )
        return Send(worker=member.name, message=join)

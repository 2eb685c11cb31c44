"""`Agreement`: makes this balancer's state match what ranks run. Ranks take precedence."""

from collections import Counter
from collections.abc import Sequence

from equipoise.planning.layout import Layout, digest_text
from equipoise.planning.proposal import has_places
from equipoise.planning.reconcile import contradiction, reconcile
from equipoise.planning.rollout import State
from equipoise.pool.attendance import Attendance
from equipoise.pool.counters import Counters
from equipoise.pool.effects import Chain, Log, WriteAdopted, WriteMembership
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.quarantine import Quarantine
from equipoise.pool.rollouts import Rollouts
from equipoise.pool.verification import Verification
from equipoise.pool.windows import Windows
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Heartbeat, RunningState, Serving, Switched, WorkerMessage

UNKNOWN_LAYOUT = "unknown_layout"
"""Kind of the rejection that ends a rank's stream: it reports the layout itself on the next one."""

_CONTRADICTION = "generations of ranks"
_NO_TABLE = "checksums of the checkpoint"

MAX_NAMED = 4
"""Ranks that one fault names."""


class Agreement:
    """What the ranks of the epoch run, and where they contradict each other."""

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        roster: Roster,
        attendance: Attendance,
        layouts: PoolLayouts,
        verification: Verification,
        quarantine: Quarantine,
        windows: Windows,
        rollouts: Rollouts,
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._attendance = attendance
        self._layouts = layouts
        self._verification = verification
        self._quarantine = quarantine
        self._rejections = counters.rejections
        self._windows = windows
        self._rollouts = rollouts
        self._faults: dict[str, str] = {}
        # By rank: generation and digest of layouts that ranks report to run, and should not.
        self._others: dict[int, tuple[int, bytes]] = {}
        self._opened_here = False
        self.must_reconcile = False
        """Whether ranks that served without this balancer still have to be reconciled."""

    @property
    def faults(self) -> Sequence[str]:
        """What is wrong with the ranks of the epoch."""
        return tuple(self._faults.values())

    @property
    def is_settled(self) -> bool:
        """Whether all ranks serve, run the same, and nothing is rolled out to them."""
        return (
            self._roster.complete
            and self._rollouts.current is None
            and not self.must_reconcile
            and not (self._attendance.silent or self._faults)
            and self._verification.complete
        )

    def begin_epoch(self, *, opened_here: bool) -> None:
        """Drop what is about the ranks of the epoch before.

        An epoch that was not `opened_here` is one that this balancer found.
        """
        self._faults.clear()
        self._others.clear()
        self._verification.begin_epoch()
        self._opened_here, self.must_reconcile = opened_here, not opened_here

    def note_joining(self, rank: int, *, rejected: str) -> None:
        """A rank joined the epoch, unless it `rejected` that for a reason."""
        concern = f"join of rank {rank}"
        self._faults.pop(concern, None)
        if rejected:
            self._faults[concern] = f"rank {rank} rejected the epoch: {rejected}"

    def may_run(self, generation: int) -> bool:
        """Whether ranks of the epoch can run a generation.

        It is the current one, or the latest wave's: ranks switch before they report it. Ranks that
        were found may run any whose layout is known, from the store or from a Hello.
        """
        if self.must_reconcile:
            return self._layouts.get(generation) is not None
        layouts, wave = [self._layouts.current], self._rollouts.latest
        if wave is not None and wave.state is not State.ACTIVE:
            layouts += [wave.base, wave.target]
        return any(one is not None and one.generation == generation for one in layouts)

    def note_running(self, member: Member, heartbeat: Heartbeat) -> bool:
        """Take over the generation that a rank runs, if its layout is ours by content.

        Returns False if it is not.

        Raises:
            InvalidMessageError: most ranks run a layout that this balancer does not know; the
                streams of these ranks must end, so that they report it.
        """
        rank, generation = member.rank, heartbeat.generation
        assert rank is not None, "only a rank runs a layout"
        self._others.pop(rank, None)
        if generation == 0 and not member.serving:
            return True  # It still loads its experts.
        concern = f"layout of rank {rank}"
        layout, digest = self._layouts.get(generation), heartbeat.layout_digest
        if not self.may_run(generation):
            self._note_conflict(concern, self._other_generation(rank, member.name, generation))
            if not self._is_of_most(rank, generation, digest):
                return False
            # They switched to what the store forgot, or to a wave that was aborted too late.
            self.must_reconcile = True
            if layout is None:
                raise InvalidMessageError(
                    UNKNOWN_LAYOUT,
                    f"{member.name} runs generation {generation} like most ranks, but its layout "
                    "is not known here: the worker reconnects and reports it",
                )
        if layout is not None and digest not in {b"", layout.digest()}:
            fault = (
                f"rank {rank} ({member.name}) runs layout {digest_text(digest)} as generation "
                f"{generation}, whose layout is {digest_text(layout.digest())}: restart it"
            )
            self._note_conflict(concern, fault)
            return False
        self._faults.pop(concern, None)
        if heartbeat.staged_generation < self._layouts.next_generation:
            member.note_generations(heartbeat)
        return True

    def check_hello(self, worker: str, running: RunningState) -> None:
        """Check what a rank that reconnects reports to run in the current epoch.

        A slow network may deliver its Hello after a wave that it took part in has ended. If most
        ranks report the same unknown layout, all are reconciled; who was rejected before retries.

        Raises:
            RejectedWorkerError: it runs a generation that this balancer does not know, and not like
                most ranks.
        """
        generation = running.generation
        if self.must_reconcile or self._layouts.get(generation) is not None:
            return
        if not self._is_of_most(running.rank, generation, running.layout.digest()):
            fault = self._other_generation(running.rank, worker, generation)
            raise RejectedWorkerError("hello_generation", f"worker {worker}: {fault}")
        self.must_reconcile = True

    def _other_generation(self, rank: int, worker: str, generation: int) -> str:
        current = self._layouts.current
        ours = "another one" if current is None else f"generation {current.generation}"
        return (
            f"rank {rank} ({worker}) runs generation {generation}, but the pool runs "
            f"{ours}: restart it"
        )

    def _is_of_most(self, rank: int, generation: int, digest: bytes) -> bool:
        """Whether most ranks report this layout, as the rank does that should not run it."""
        self._others[rank] = claim = generation, digest
        return 2 * list(self._others.values()).count(claim) > self._roster.num_ranks

    def _note_conflict(self, concern: str, fault: str) -> None:
        if concern not in self._faults:
            self._rejections.count("layout_conflict", fault)
        self._faults[concern] = fault

    def note_weights(self, member: Member) -> None:
        """Plan nothing while a rank holds weights other than those that it hashed."""
        concern = f"weights of rank {member.rank}"
        self._faults.pop(concern, None)
        if member.has_new_weights:
            self._faults[concern] = (
                f"rank {member.rank} ({member.name}) has new weights (version "
                f"{member.weights_version}): nothing is planned until all ranks have hashed them"
            )

    def note_switch(self, member: Member, switched: Switched) -> None:
        """Compare the steps at which ranks switched: by their protocol it was the same one.

        Once all ranks have reported, it is that of most of them, committed or not.
        """
        assert member.rank is not None, "only a rank switches"
        committed = self._rollouts.committed_step(switched.generation)
        steps = dict(self._rollouts.reported_steps(switched.generation))
        if steps:
            steps[member.rank] = switched.step
            step, count = Counter(steps.values()).most_common(1)[0]
            agreed = step if 2 * count > len(steps) else committed
        else:
            steps, agreed = {member.rank: switched.step}, committed
            if agreed is None:
                return
        theirs = "other ranks at others" if agreed is None else f"the pool did at step {agreed}"
        for rank, step in steps.items():
            concern = f"switch of rank {rank}"
            self._faults.pop(concern, None)
            if step != agreed:
                self._faults[concern] = (
                    f"rank {rank} ({self._roster.name_at(rank)}) reports that it switched "
                    f"to generation {switched.generation} at step {step}, but {theirs}: restart it"
                )

    def note_bytes(
        self,
        member: Member,
        layout: Layout | None,
        report: RunningState | Serving | Switched,
        *,
        now: float,
    ) -> Chain:
        """A rank reports what its slots hold; who differs from the checkpoint is quarantined."""
        if layout is None or member.rank is None:
            return ()
        self._verification.note(member, layout, report.checksums)
        differences: dict[Member, str] = {}
        table = None if isinstance(report, Switched) else report.expert_checksums
        if table is not None and (fault := self._verification.learn(member, table)):
            differences[member] = fault
        differences |= self._verification.compare()
        return tuple(
            effect
            for one, fault in differences.items()
            if self._roster.members.get(one.name) is one  # Else another process has its name.
            for effect in self._quarantine.note_bytes(one, fault, now=now)
        )

    def note_late(self, member: Member, report: WorkerMessage, *, now: float) -> Chain:
        """A worker reports as a rank of an earlier epoch: only wrong bytes still count."""
        if member.is_claiming or not isinstance(report, Serving):
            return ()
        layout = self._layouts.get(report.generation)
        if layout is None or report.layout_digest != layout.digest():
            return ()
        fault = self._verification.difference(member, layout, report.rank, report.checksums)
        return self._quarantine.note_bytes(member, fault, now=now) if fault else ()

    def settle(self, *, now: float) -> Chain:
        """Once all ranks reported what they run, and nothing is rolled out, take that as the truth.

        Level-triggered and idempotent: it runs after every message and every tick.
        """
        if not self._roster.complete or self._rollouts.current is not None:
            return ()
        self._note_table()
        effects = self._reconcile(now=now) if self.must_reconcile else ()
        self._faults.pop(_CONTRADICTION, None)
        running = {member.generation for member in self._roster.seated()}
        if self.must_reconcile and len(running) != 1:
            self._faults[_CONTRADICTION] = self._contradiction()
        if len(running) != 1 or self.must_reconcile or self._rollouts.current is not None:
            return effects
        layout = self._layouts.get(running.pop())
        if layout is None:
            return effects
        if self._windows.loads is None:
            self._open_loads(layout, now=now)
        return (*effects, *self._adopt(layout))

    def _note_table(self) -> None:
        """Without rank 0's table no rank can be verified, so nothing is planned."""
        self._faults.pop(_NO_TABLE, None)
        if self._verification.table is None:
            name = self._roster.name_at(0)
            self._faults[_NO_TABLE] = (
                f"rank 0 ({name}) has not sent the checksums of the checkpoint: restart it"
            )

    def _open_loads(self, layout: Layout, *, now: float) -> None:
        shape = self._roster.shape
        assert shape is not None, "a complete pool has a shape"
        self._windows.open(
            epoch=self._roster.epoch,
            model=shape.model,
            num_ranks=self._roster.num_ranks,
            least_ranks=self._roster.needs.least_ranks(self._roster.places_of_rank),
            # Ranks that were found serving began their generation before this balancer listened.
            counted_from=1 if self._opened_here else layout.generation + 1,
            now=now,
        )

    def _adopt(self, layout: Layout) -> Chain:
        if self._layouts.current is not layout:
            self._layouts.run(layout)
        generation = layout.generation
        if not self._layouts.needs_adoption(generation):
            return ()
        self._layouts.begin_adoption(generation)
        log = Log(text=f"all ranks run generation {generation}: committed", generation=generation)
        return (log, WriteAdopted(layout=layout))

    def _reconcile(self, *, now: float) -> Chain:
        """Reconcile with ranks that served without a balancer; a wave may be staged or switched."""
        members = self._roster.seated()
        generations = dict(enumerate(member.generation for member in members))
        committed, proposed = map(self._as_run, (self._layouts.current, self._layouts.proposed))
        if committed is None or not self._fits(committed):
            # The store has no record of these ranks; what they agree on is adopted as it is.
            self.must_reconcile = len(set(generations.values())) != 1
            return () if self.must_reconcile else self._record_found()
        if proposed is not None and not self._fits(proposed):
            proposed = None  # For the ranks of another epoch, which never served.
        if self._verification.table is None:
            return ()
        result = reconcile(
            generations_of_ranks=generations,
            staged_of_ranks=dict(enumerate(member.staged_generation for member in members)),
            proposed=proposed,
            committed=committed,
            policy=self._policy.values,
            now=now,
        )
        if result.generation is None:
            return ()  # A message may still be on its way; until it arrives nothing is planned.
        self.must_reconcile = False
        log = Log(text=result.reason, epoch=self._roster.epoch, generation=result.generation)
        resumed = self._rollouts.resume(result.wave, result.commands, now=now)
        return (log, *resumed, *self._record_found())

    def _contradiction(self) -> str:
        """Name the ranks that run another generation than most, if most run the same."""
        members = self._roster.seated()
        most, count = Counter(member.generation for member in members).most_common(1)[0]
        if 2 * count <= len(members):
            return contradiction({place: one.generation for place, one in enumerate(members)})
        others = [
            f"rank {one.rank} ({one.name}) runs generation {one.generation}"
            for one in members
            if one.generation != most
        ]
        which = "it" if len(others) == 1 else "them"
        return (
            f"{', '.join(others[:MAX_NAMED])}, but {count} of {len(members)} ranks run generation "
            f"{most}: restart {which}"
        )

    def _record_found(self) -> Chain:
        """Record the found epoch, unless a later one is on record: its ranks never took that up."""
        roster = self._roster
        if roster.epoch < roster.recorded_epoch:
            return ()
        return (WriteMembership(members=roster.epoch_members()),)

    def _as_run(self, stored: Layout | None) -> Layout | None:
        """What ranks run under the number of a stored layout: perhaps not what the store has."""
        return None if stored is None else self._layouts.get(stored.generation) or stored

    def _fits(self, layout: Layout) -> bool:
        """Whether a layout is one for the ranks of the epoch."""
        shape = self._roster.shape
        return (
            shape is not None
            and layout.num_layers == shape.model.num_layers
            and layout.num_experts == shape.model.num_experts
            and layout.num_ranks == self._roster.num_ranks
            and layout.slots_per_rank == shape.slots_per_rank
            and has_places(layout, places_of_rank=self._roster.places_of_rank)
        )

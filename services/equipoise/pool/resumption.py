"""`Resumption`: which ranks a balancer takes over that run an epoch which it did not open.

`planning/resumption.py` decides. Until then no worker's report of what it runs has an effect.
"""

from equipoise.planning.resumption import GroupChoice, choose_group
from equipoise.pool.agreement import Agreement
from equipoise.pool.counters import Counters
from equipoise.pool.effects import Chain, Effect, Log
from equipoise.pool.hello_checks import check_running_layout
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import EpochMembers
from equipoise.wire.messages import Hello, RunningState


class Resumption:
    """Weighs what workers report to run; `recorded` is the latest epoch in the store."""

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        roster: Roster,
        layouts: PoolLayouts,
        agreement: Agreement,
        counters: Counters,
        recorded: EpochMembers | None,
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._layouts = layouts
        self._agreement = agreement
        self._timeouts = counters.timeouts
        self._recorded = recorded
        self._since_s: float | None = None

    @property
    def is_on_record(self) -> bool:
        """Whether an epoch of the pool is known to the store or this balancer."""
        return self._recorded is not None or self._roster.epoch > 0

    def choose(self, *, now: float) -> GroupChoice | None:
        """Which group to take over, or to wait for; None if that is decided already."""
        claims = self._roster.claims()
        outside = [claim for claim in claims if not claim.is_rank]
        contradicting = self._roster.contradicting
        is_open = any(claim.worker not in contradicting for claim in outside)
        if not is_open:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now
        if not outside:
            return None
        members = [one for one in self._roster.members.values() if one.connected]
        choice = choose_group(
            claims,
            recorded=self._latest(),
            connected=frozenset(member.name for member in members),
            num_opposed=self._roster.opponents(),
            known={
                claim.generation: layout.digest()
                for claim in claims
                if (layout := self._layouts.get(claim.generation)) is not None
            },
            waited_s=0.0 if self._since_s is None else now - self._since_s,
            policy=self._policy.values,
        )
        if choice.is_waiting:
            return choice if is_open else None
        self._since_s = None
        is_new = is_open or any(not claim.is_rank for claim in choice.ranks)
        return choice if is_new or not choice.ranks else None

    def take_over(self, choice: GroupChoice, *, now: float) -> Chain:
        """Count the ranks of a chosen group; if there is none, its workers wait for an epoch."""
        if choice.is_late:
            self._timeouts.note("reform", choice.reason)
        if not choice.ranks:
            self._roster.release_claims(choice.reason)
            return (Log(text=choice.reason, is_warning=True),)
        effects: list[Effect] = [
            Log(text=f"worker {worker} gets no rank: {reason}", is_warning=True, worker=worker)
            for worker, reason in choice.contradicting.items()
        ]
        for member in self._roster.take_over(choice):
            assert member.claim is not None, "it reported to run"
            effects += self.note_running(member, member.claim, now=now)
        return tuple(effects)

    def check(self, hello: Hello) -> None:
        """Check a rank that reconnects.

        Raises:
            RejectedWorkerError: it runs a generation that its epoch does not, or another layout
                under the same generation than others that run.
        """
        known, running = self._roster.members.get(hello.worker), hello.running
        if running is None:
            return
        if self._roster.has_rank(hello.worker, running):
            self._agreement.check_hello(hello.worker, running)
        elif known is None or known.rank is None:
            return
        others_run = any(
            member.connected and member.serving and member.name != hello.worker
            for member in self._roster.seated()
        )
        if others_run:
            check_running_layout(hello, self._layouts.get(running.generation))

    def note_running(self, member: Member, running: RunningState, *, now: float) -> Chain:
        """A worker counts as a rank that runs what it reported in its Hello."""
        self._layouts.remember(running.layout)
        return self._agreement.note_bytes(member, running.layout, running, now=now)

    def _latest(self) -> tuple[int, tuple[str, ...]]:
        """The epoch opened here, else that of the store, with its workers."""
        opened_here = self._roster.opened_here
        latest = self._roster.epoch_members() if opened_here else self._recorded
        return (0, ()) if latest is None else (latest.epoch, latest.workers)

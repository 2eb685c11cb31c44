"""`OperatorRequests`: whether each can be carried out, and what is recorded of it.

A rejected request is recorded like one that is carried out, and both with the reason. Previews
change nothing and are not recorded, so that any number of them evicts no operation.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal, fits, has_places
from equipoise.pool.decisions import Decisions
from equipoise.pool.effects import Chain, Effect, Propose, Reply, WriteAudit, WriteDecision
from equipoise.pool.health import Diagnosis
from equipoise.pool.journal import Journal
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.members import Roster
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import AuditRecord, Hold
from equipoise.pool.requests import (
    AdminRequest,
    Answer,
    Pause,
    Pin,
    Preview,
    Rebalance,
    Resume,
    RollBack,
    Unpin,
)
from equipoise.pool.rollouts import Rollouts
from equipoise.pool.windows import Windows

MAX_POSTPONED = 8
"""Requests to plan that may wait for the plan in progress; each is then handled in turn."""

_A_DAY_S = 86400.0
_NO_HOLD = Hold()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Postponed:
    """A request that waits for the plan in progress, and when it expires."""

    request: AdminRequest
    until_s: float


class OperatorRequests:
    """Carries out the requests of operators on one pool."""

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        roster: Roster,
        layouts: PoolLayouts,
        windows: Windows,
        rollouts: Rollouts,
        journal: Journal,
        decisions: Decisions,
        diagnosis: Callable[[], Diagnosis],
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._layouts = layouts
        self._windows = windows
        self._rollouts = rollouts
        self._journal = journal
        self._decisions = decisions
        self._diagnosis = diagnosis
        self._postponed: deque[_Postponed] = deque()

    def administer(  # noqa: PLR0911 - a case for each operation
        self, request: AdminRequest, *, now: float
    ) -> Chain:
        """Carry out a request, or reject it."""
        match request.operation:
            case Pause():
                return self._pause(request, now=now)
            case Resume():
                return self._resume(request, now=now)
            case RollBack() as operation:
                return self._roll_back(request, operation, now=now)
            case Pin() as operation:
                return self._pin(request, operation, now=now)
            case Unpin():
                return self._unpin(request, now=now)
            case Rebalance() as operation:
                return self._rebalance(request, operation, now=now)
            case Preview(policy=policy):
                return self._plan(request, policy=policy, now=now)

    def note_audit(self, write: WriteAudit, *, now: float) -> Chain:
        """An audit record is written: what it holds the pool to applies from here on."""
        self._journal.note_audit(write)
        # An operator who pins a paused pool wants it there now.
        is_pin = write.hold is not None and isinstance(write.request.operation, Pin)
        return self._decisions.keep_to_pin(now=now) if is_pin else ()

    def planned(
        self, request: AdminRequest, proposal: Proposal, *, plan_ms: float, now: float
    ) -> Chain:
        """The plan that a request needs is ready."""
        verdict = proposal.verdict
        if isinstance(request.operation, Preview):
            words = f"would be {'adopted' if verdict.accepted else 'rejected'}: {verdict.reason}"
            answer = Answer(accepted=verdict.accepted, reason=words, proposal=proposal)
            return _answered(request, answer, now=now)
        chain = self._decisions.decide(proposal, plan_ms=plan_ms, now=now, is_requested=True)
        record = next(effect.record for effect in chain if isinstance(effect, WriteDecision))
        answer = Answer(
            accepted=record.accepted,
            reason=record.reason,
            generation=proposal.waves[-1].generation if record.accepted else 0,
        )
        return (*_answered(request, answer, now=now), *chain)

    def plan_failed(self, request: AdminRequest | None, reason: str, *, now: float) -> Chain:
        """A plan failed or took too long, that for `request` if there is one."""
        if request is None or not isinstance(request.operation, Preview):
            self._decisions.end_proposing()
        return () if request is None else _rejected(request, reason, now=now)

    def handle_postponed(self, *, now: float) -> Chain:
        """A plan has ended: handle the requests that waited for it as if they came now."""
        effects: list[Effect] = []
        while self._postponed and not self._decisions.is_proposing:
            postponed = self._postponed.popleft()
            if now <= postponed.until_s:
                effects += self.administer(postponed.request, now=now)
            else:
                words = "earlier plans took too long, so this request has expired"
                effects += _rejected(postponed.request, words, now=now)
        return tuple(effects)

    # Holding ------------------------------------------------------------------------------------

    def _pause(self, request: AdminRequest, *, now: float) -> Chain:
        hold = self._journal.hold
        if hold.paused:
            return _rejected(request, f"it is already paused, by {hold.paused}", now=now)
        rollout = self._rollouts.current
        words = "planning is paused until it is resumed"
        if rollout is not None:
            words += (
                f"; the rollout of generation {rollout.target.generation} continues to completion"
            )
        answer = Answer(accepted=True, reason=words)
        return _answered(
            request, answer, now=now, hold=replace(hold, paused=request.by), before=hold
        )

    def _resume(self, request: AdminRequest, *, now: float) -> Chain:
        hold = self._journal.hold
        if not hold.paused:
            return _rejected(request, "it is not paused", now=now)
        words = "planning resumes at the end of the interval"
        if hold.pinned:
            words = f"no longer paused; still pinned by {hold.pinned}"
        answer = Answer(accepted=True, reason=words)
        return _answered(request, answer, now=now, hold=replace(hold, paused=""), before=hold)

    def _pin(self, request: AdminRequest, operation: Pin, *, now: float) -> Chain:
        current, hold = self._layouts.current, self._journal.hold
        if current is None:
            return _rejected(request, f"the pool has no layout yet: {self._trouble()}", now=now)
        target = operation.layout or current
        if not self._fits(target, current):
            return _rejected(request, self._misfit(current), now=now)
        generation = current.generation if operation.layout is None else operation.generation
        words = f"generation {current.generation} stays until it is unpinned"
        if (rollout := self._rollouts.current) is not None:
            words = (
                f"the rollout of generation {rollout.target.generation} continues to completion; "
                "then the pool switches to the pinned placement and stays until it is unpinned"
            )
        elif not current.same_placement(target):
            can_go = self._decisions.can_roll_out
            when = "now" if can_go else f"as soon as possible ({self._trouble()})"
            words = (
                f"the pool switches to the pinned placement {when} and stays until it is unpinned"
            )
        answer = Answer(accepted=True, reason=words, generation=generation)
        # A copy, so that it outlives an unpin of the same pin that is still being written.
        pin = copy(target)
        pinned = Hold(paused=hold.paused, pinned=request.by, pin=pin, pinned_generation=generation)
        return _answered(request, answer, now=now, hold=pinned, before=hold)

    def _unpin(self, request: AdminRequest, *, now: float) -> Chain:
        hold = self._journal.hold
        if not hold.pinned:
            return _rejected(request, "it is not pinned", now=now)
        words = "planning resumes at the end of the interval"
        if hold.paused:
            words = f"no longer pinned; still paused by {hold.paused}"
        answer = Answer(accepted=True, reason=words)
        return _answered(request, answer, now=now, hold=Hold(paused=hold.paused), before=hold)

    def _fits(self, layout: Layout, current: Layout) -> bool:
        """Whether the pool's ranks can hold a layout."""
        return fits(layout, current) and has_places(
            layout, places_of_rank=self._roster.places_of_rank
        )

    def _misfit(self, current: Layout) -> str:
        of_rank = self._roster.places_of_rank
        places = f" and {_range_text(of_rank)} places a rank" if of_rank else ""
        return (
            f"the layout does not fit the pool, which has {current.num_layers} "
            f"layers of {current.num_experts} experts on {current.num_ranks} ranks with "
            f"{current.num_slots} slots{places}"
        )

    # Moving -------------------------------------------------------------------------------------

    def _roll_back(self, request: AdminRequest, operation: RollBack, *, now: float) -> Chain:
        current, hold = self._layouts.current, self._journal.hold
        target = operation.layout
        if hold.pinned:
            return _rejected(request, f"unpin it first: pinned by {hold.pinned}", now=now)
        if current is None or not self._decisions.can_roll_out:
            return self._busy(request, now=now)
        if not self._fits(target, current):
            return _rejected(request, self._misfit(current), now=now)
        if current.same_placement(target):
            words = f"generation {current.generation} already has this placement"
            return _rejected(request, words, now=now)
        reason = f"back to the placement of generation {target.generation}, by {request.by}"
        chain = self._decisions.adopt(target, algorithm="rollback", reason=reason, now=now)
        rollout = self._rollouts.current
        assert rollout is not None, "placements differ, so there is a wave"
        goal = rollout.target.generation + self._rollouts.waves_left
        words = f"generation {goal} places experts as generation {target.generation} did; "
        if hold.paused:
            words += f"planning stays paused by {hold.paused}"
        elif operation.keep_planning:
            words += "planning continues"
        else:
            words += "planning is paused, because the next plan would undo it: resume it when ready"
        new_hold = None
        if not operation.keep_planning:
            new_hold = replace(hold, paused=hold.paused or f"{request.by} (rollback)")
        answer = Answer(accepted=True, reason=words, generation=goal)
        # Paused even if a resume is still being written.
        before = replace(hold, paused="")
        return (*_answered(request, answer, now=now, hold=new_hold, before=before), *chain)

    def _rebalance(self, request: AdminRequest, operation: Rebalance, *, now: float) -> Chain:
        held = self._journal.hold.reason
        if held:
            return _rejected(request, f"resume or unpin it first: {held}", now=now)
        if self._decisions.is_proposing:
            return self._postpone(request, now=now)
        if not self._decisions.can_roll_out:
            return self._busy(request, now=now)
        policy = replace(self._policy.values, cooldown_s=0.0, plan_below=1.0)
        if operation.force:
            policy = replace(
                policy,
                min_assignments=0.0,
                min_gain=0.0,
                min_throughput_gain=0.0,
                payback_s=_A_DAY_S,
            )
        chain = self._plan(request, policy=policy, now=now)
        if any(isinstance(effect, Propose) for effect in chain):
            self._decisions.begin_proposing()
        return chain

    def _postpone(self, request: AdminRequest, *, now: float) -> Chain:
        if len(self._postponed) >= MAX_POSTPONED:
            words = f"{MAX_POSTPONED} requests are already waiting for a plan"
            return _rejected(request, words, now=now)
        until_s = now + self._policy.values.plan_timeout_s
        self._postponed.append(_Postponed(request=request, until_s=until_s))
        return ()

    def _plan(self, request: AdminRequest, *, policy: Policy, now: float) -> Chain:
        """Have a plan made on the latest window that had traffic."""
        window = self._windows.latest_with_traffic
        if window is None or self._windows.loads is None or self._layouts.current is None:
            words = f"no window with traffic has closed yet: {self._trouble()}"
            return _rejected(request, words, now=now)
        wanted = self._decisions.proposal_request(window, policy=policy, now=now)
        return (Propose(request=wanted, requested_by=request),)

    def _busy(self, request: AdminRequest, *, now: float) -> Chain:
        words = f"nothing can be rolled out now: {self._trouble()}"
        return _rejected(request, words, now=now)

    def _trouble(self) -> str:
        rollout = self._rollouts.current
        if rollout is not None:
            return f"generation {rollout.target.generation} is being rolled out ({rollout.state})"
        trouble = self._diagnosis().reason or self._roster.idleness
        return trouble or "the pool is settling: try again in a moment"


def _range_text(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _rejected(request: AdminRequest, reason: str, *, now: float) -> Chain:
    return _answered(request, Answer(accepted=False, reason=reason), now=now)


def _answered(
    request: AdminRequest,
    answer: Answer,
    *,
    now: float,
    hold: Hold | None = None,
    before: Hold = _NO_HOLD,
) -> Chain:
    """Record first: no operation is carried out without an audit record."""
    if isinstance(request.operation, Preview):
        return (Reply(request=request, answer=answer),)
    record = AuditRecord(
        time_unix_s=now,
        who=request.who,
        what=request.what,
        accepted=answer.accepted,
        outcome=answer.reason,
    )
    write = WriteAudit(record=record, hold=hold, hold_before=before, request=request, answer=answer)
    return (write,)

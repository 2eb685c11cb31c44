"""`Decisions`: from a closed window to a verdict, and from a rollout to what it gained.

`planning/proposal.py` makes plans and judges them, in another process;
`planning/expected_gain.py` judges what a rollout gained.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.expected_gain import (
    ExpectedGain,
    ObservedWindow,
    RealisedGain,
    judge_gain,
    too_soon_again,
)
from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy, StoreDown, Weighting
from equipoise.planning.proposal import Proposal, ProposalRequest, fits, has_places, propose_layout
from equipoise.policy.digest import digest
from equipoise.pool.agreement import Agreement
from equipoise.pool.attendance import Attendance
from equipoise.pool.counters import Counters
from equipoise.pool.effects import Chain, Effect, Log, Propose, WriteAverage, WriteDecision
from equipoise.pool.journal import Journal
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.members import Roster
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import DecisionKind, DecisionRecord
from equipoise.pool.rollouts import Rollouts
from equipoise.pool.windows import Windows

MAX_JUDGED = 16
"""Judged rollouts kept for status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRollout:
    """A rollout of an epoch, and the windows in which its gain was measured so far."""

    epoch: int
    expected: ExpectedGain
    witnesses: tuple[ObservedWindow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """What a rollout was expected to gain, what it gained, and when that was judged."""

    expected: ExpectedGain
    realised: RealisedGain
    judged_s: float


class Decisions:
    """Has plans made on a pool's windows, and decides about them."""

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        roster: Roster,
        attendance: Attendance,
        agreement: Agreement,
        layouts: PoolLayouts,
        windows: Windows,
        rollouts: Rollouts,
        journal: Journal,
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._attendance = attendance
        self._agreement = agreement
        self._layouts = layouts
        self._windows = windows
        self._rollouts = rollouts
        self._journal = journal
        self._tally = counters.tally
        self.is_proposing = False
        """Whether a plan that may be adopted is being made."""
        self._watched: WatchedRollout | None = None
        self._judged: deque[JudgedRollout] = deque(maxlen=MAX_JUDGED)
        self._rolled_back_s: float | None = None
        self._restored_digest = b""
        """Digest of the layout that the latest rollback restored."""

    @property
    def can_roll_out(self) -> bool:
        """Whether a new layout could be rolled out now."""
        is_ready = self._agreement.is_settled and not self._roster.idleness
        return is_ready and not self._journal.store_fault

    @property
    def watched(self) -> WatchedRollout | None:
        """The latest rollout of this epoch, until it is judged."""
        watched = self._watched
        return watched if watched is not None and watched.epoch == self._roster.epoch else None

    @property
    def judged(self) -> Sequence[JudgedRollout]:
        """Judged rollouts, newest first."""
        return self._judged

    # Windows ------------------------------------------------------------------------------------

    def close_due_window(self, *, now: float) -> Chain:
        """Close the window if it is due, and have a plan made on it unless something prevents that.

        A window without traffic gets no verdict: hours of idleness would push the useful ones out
        of the store.
        """
        current = self._layouts.current
        if current is None:
            return ()
        window = self._windows.close_due(generation=current.generation, now=now)
        if window is None:
            return ()
        effects: list[Effect] = [*self._judge_rollout(window, now=now)]
        found = self._windows.find_slow(window)
        effects += self._attendance.exclude_slow(self._windows.slow, found=found, now=now)
        wants_plan = window.assignments and not self.is_proposing and not self._journal.hold.reason
        if wants_plan and self._can_plan:
            if doubt := window.doubt or self._roster.idleness:
                effects.append(self._undecided(window, current, doubt=doubt, now=now))
            else:
                self.is_proposing = True
                request = self.proposal_request(window, policy=self._policy.values, now=now)
                effects.append(Propose(request=request))
        assert self._windows.loads is not None, "a window was closed"
        records = self._windows.loads.records(now=now)
        effects += [WriteAverage(name=name, record=record) for name, record in records.items()]
        return tuple(effects)

    def proposal_request(
        self, window: ClosedWindow, *, policy: Policy, now: float
    ) -> ProposalRequest:
        """What the planner needs to plan by `policy` on a window of this epoch."""
        loads, current = self._windows.loads, self._layouts.current
        shape = self._roster.shape
        assert loads is not None, "a window was closed"
        assert current is not None, "a window was closed"
        assert shape is not None, "a window was closed"
        in_force = self._policy.in_force
        policy_hash = in_force.digest if policy is in_force.values else digest(policy)
        if shape.engine:  # Its replicas share their expert's load evenly.
            policy = replace(policy, weighted=Weighting.OFF)
        return ProposalRequest(
            current=current,
            average=loads.slow.at_risk(policy.risk_z),
            samples=loads.slow.samples(),
            window=window.load,
            traffic=self._windows.traffic,
            balancedness=window.balancedness,
            shift=window.shift,
            model=shape.model,
            topology=self._roster.topology(),
            policy=policy,
            policy_hash=policy_hash,
            first_generation=self._layouts.next_generation,
            now=now,
            last_switch_s=self._rollouts.last_switch_s,
            costs=MeasuredCosts(
                step=window.step,
                step_cost=self._windows.step_cost,
                num_windows=self._windows.num_step_windows,
                waves=self._rollouts.measured_waves(expert_bytes=shape.model.expert_bytes),
            ),
        )

    @property
    def _can_plan(self) -> bool:
        """Whether a plan may be made and judged, even if it can only be recorded."""
        in_memory = self._policy.values.store_down is StoreDown.MEMORY
        return self._agreement.is_settled and (in_memory or not self._journal.store_fault)

    def _undecided(
        self, window: ClosedWindow, current: Layout, *, doubt: str, now: float
    ) -> WriteDecision:
        """Make no plan on such a window: ranks that did not report would look idle."""
        self._tally.note_undecided()
        return WriteDecision(
            record=DecisionRecord(
                time_unix_s=now,
                accepted=False,
                reason=f"nothing is planned on this window: {doubt}",
                base_generation=current.generation,
                balancedness_current=window.balancedness,
                shift_detected=window.shift.detected,
                policy_hash=self._policy.in_force.digest,
                phase=window.phase,
            )
        )

    # Plans --------------------------------------------------------------------------------------

    def begin_proposing(self) -> None:
        """A plan that may be adopted is being made."""
        self.is_proposing = True

    def end_proposing(self) -> None:
        """There will be no such plan."""
        self.is_proposing = False

    def decide(
        self, proposal: Proposal, *, plan_ms: float, now: float, is_requested: bool = False
    ) -> Chain:
        """Record the verdict on a proposal, and roll it out if it is yes and still applies.

        One that an operator requested is adopted even if the pool is paused meanwhile, but not if
        it is pinned.
        """
        self.is_proposing = False
        request, veto = proposal.request, None
        if proposal.verdict.accepted:
            veto = self._cannot_roll_out(request) or (
                self._pinned() if is_requested else self._vetoed(request, now=now)
            )
        phase = self._roster.phase or ""
        decision = DecisionRecord.of_proposal(
            proposal, phase=phase, now=now, veto=veto, plan_ms=plan_ms
        )
        self._tally.note_decision(accepted=decision.accepted, plan_s=plan_ms / 1000)
        if not decision.accepted:
            return (WriteDecision(record=decision),)
        self._watch(proposal)
        self._windows.note_switch()
        started = self._rollouts.start(
            proposal.waves, base=request.current, decision=decision, now=now
        )
        return (*started, WriteDecision(record=decision))

    def adopt(self, target: Layout, *, algorithm: str, reason: str, now: float) -> Chain:
        """Roll out the placement of `target`, wave by wave, as a new generation.

        `can_roll_out` must hold and `target` fit what runs. `algorithm` is what the decision shows
        in place of a planner's: "rollback" or "pin".
        """
        current, shape = self._layouts.current, self._roster.shape
        assert self.can_roll_out, "checked before"
        assert current is not None, "a pool that can roll out has a layout"
        assert shape is not None, "a pool that can roll out has a shape"
        latest = self._windows.latest
        given = propose_layout(
            current,
            target,
            window=latest.load if latest is not None else None,
            model=shape.model,
            policy=self._policy.values,
            first_generation=self._layouts.next_generation,
        )
        if not given.waves:
            return ()
        decision = DecisionRecord(
            time_unix_s=now,
            accepted=True,
            reason=reason,
            base_generation=current.generation,
            balancedness_current=given.balancedness_current,
            balancedness_proposed=given.balancedness_proposed,
            moves=given.moves,
            bytes=given.bytes,
            algorithm=algorithm,
        )
        started = self._rollouts.start(given.waves, base=current, decision=decision, now=now)
        return (*started, WriteDecision(record=decision))

    def keep_to_pin(self, *, now: float) -> Chain:
        """Roll out the placement that the pool is pinned to, if it runs another."""
        hold, current = self._journal.hold, self._layouts.current
        if hold.pin is None or current is None or not self.can_roll_out:
            return ()
        if current.same_placement(hold.pin) or not fits(hold.pin, current):
            return ()
        if not has_places(hold.pin, places_of_rank=self._roster.places_of_rank):
            return ()
        return self.adopt(hold.pin, algorithm="pin", reason=f"pinned by {hold.pinned}", now=now)

    def record_policy(self, change: str, *, now: float) -> Chain:
        """Record that another policy came into force."""
        record = DecisionRecord(
            kind=DecisionKind.POLICY,
            time_unix_s=now,
            accepted=True,
            reason=change,
            base_generation=self._layouts.stored_generation or 0,
            policy_hash=self._policy.in_force.digest,
        )
        return (WriteDecision(record=record),)

    def _cannot_roll_out(self, request: ProposalRequest) -> str | None:
        """Why a plan no longer applies to the pool."""
        if self._journal.store_fault and self._can_plan:
            return "the rollout waits for the store"
        if self._roster.idleness:
            return self._roster.idleness
        if not (self.can_roll_out and self._layouts.current is request.current):
            return "the pool changed while this was planned"
        return None

    def _vetoed(self, request: ProposalRequest, *, now: float) -> str | None:
        """Why a plan that no operator requested is not adopted now."""
        return (
            self._held()
            or self._has_other_policy(request)
            or self._rollouts.must_wait(now=now)
            or too_soon_again(
                self._policy.values,
                rolled_back_s=self._restored_s(request.current),
                shift_detected=request.shift.detected,
                now=now,
            )
        )

    def _restored_s(self, layout: Layout) -> float | None:
        """When the latest rollback restored this layout; None if it restored another, or none.

        In another layout, perhaps of other ranks, there may be more to gain.
        """
        return self._rolled_back_s if layout.digest() == self._restored_digest else None

    def _pinned(self) -> str | None:
        pinned = self._journal.hold.pinned
        return f"pinned by {pinned} while this was planned" if pinned else None

    def _held(self) -> str | None:
        held = self._journal.hold.reason
        return f"{held} while this was planned" if held else None

    def _has_other_policy(self, request: ProposalRequest) -> str | None:
        if self._policy.in_force.digest == request.policy_hash:
            return None
        return "the policy changed while this was planned"

    # Rollouts -----------------------------------------------------------------------------------

    def _watch(self, proposal: Proposal) -> None:
        """A plan is rolled out: remember its expected gain, and what is needed to judge it.

        One that follows before the previous one was judged is compared with the layout before both:
        rolling back leads to the last layout that proved good.
        """
        request, verdict = proposal.request, proposal.verdict
        before, optimism, step = request.current, 0.0, verdict.step
        balancedness_before = verdict.balancedness_current
        watched = self.watched
        if watched is not None:
            before, optimism = watched.expected.before, watched.expected.optimism
            balancedness_before = balancedness(layout_loads(before, request.window))
            if step is not None and watched.expected.step is not None:
                step = replace(step, current_s=watched.expected.step.current_s)
        elif request.balancedness is not None:
            optimism = balancedness_before - request.balancedness
        expected = ExpectedGain(
            before=before,
            generation=proposal.waves[-1].generation,
            balancedness_before=balancedness_before,
            balancedness_expected=verdict.balancedness_proposed,
            optimism=optimism,
            step=step,
        )
        self._watched = WatchedRollout(epoch=self._roster.epoch, expected=expected)

    def _judge_rollout(self, window: ClosedWindow, *, now: float) -> Chain:
        """A window has closed: judge the latest rollout, once enough have; perhaps roll back."""
        watched, current = self.watched, self._layouts.current
        if watched is None or current is None or self._rollouts.current is not None:
            return ()
        if current.generation != watched.expected.generation:
            # It was aborted half-way, or something else was rolled out since.
            self._watched = None
            return ()
        if not (window.switched or window.doubt):
            witness = ObservedWindow(
                load=window.load, balancedness=window.balancedness, step=window.step
            )
            watched = replace(watched, witnesses=(*watched.witnesses, witness))
            self._watched = watched
        realised = judge_gain(watched.expected, watched.witnesses, policy=self._policy.values)
        return () if realised is None else self._conclude(watched.expected, realised, now=now)

    def _conclude(self, expected: ExpectedGain, realised: RealisedGain, *, now: float) -> Chain:
        if realised.goes_back and (self._journal.hold.reason or not self.can_roll_out):
            return ()  # Judged again at the next window, when it may be possible.
        self._watched = None
        self._tally.note_judged(realised.outcome)
        self._judged.appendleft(JudgedRollout(expected=expected, realised=realised, judged_s=now))
        log = Log(text=realised.reason, generation=expected.generation)
        record = DecisionRecord.of_outcome(
            expected,
            realised,
            policy_hash=self._policy.in_force.digest,
            phase=self._roster.phase or "",
            now=now,
        )
        outcome = WriteDecision(record=record)
        if not realised.goes_back:
            return (log, outcome)
        self._rolled_back_s, self._restored_digest = now, expected.before.digest()
        back = self.adopt(expected.before, algorithm="rollback", reason=realised.reason, now=now)
        return (log, outcome, *back)

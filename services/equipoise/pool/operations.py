"""What operators order: whether it can be done, what follows, and what is recorded of it.

Decides; a refusal is recorded like an order that is carried out, and both say why.
"""

from dataclasses import replace

from equipoise.planning.layout_proposal import fits
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal
from equipoise.pool.decisions import decide, proposal_request
from equipoise.pool.effects import Chain, Effect, Propose, WriteAudit, WriteDecision
from equipoise.pool.given import adopt_given
from equipoise.pool.pool import Pool, Postponed
from equipoise.pool.records import AuditRecord, Hold
from equipoise.pool.requests import (
    AdminRequest,
    Outcome,
    Pause,
    Pin,
    Preview,
    Rebalance,
    Resume,
    RollBack,
    Unpin,
)

MAX_POSTPONED = 8
"""Orders to plan that wait for the end of the plan under way, and are then looked at one by one."""


def administer(  # noqa: PLR0911 - a case a wish
    pool: Pool, request: AdminRequest, *, now: float
) -> Chain:
    """Carry out a wish, or say why not."""
    match request.wish:
        case Pause():
            return _pause(pool, request, now=now)
        case Resume():
            return _resume(pool, request, now=now)
        case RollBack() as wish:
            return _roll_back(pool, request, wish, now=now)
        case Pin() as wish:
            return _pin(pool, request, wish, now=now)
        case Unpin():
            return _unpin(pool, request, now=now)
        case Rebalance() as wish:
            return _rebalance(pool, request, wish, now=now)
        case Preview(policy=policy):
            return _plan(pool, request, policy=policy, now=now)


def held(pool: Pool, write: WriteAudit, *, now: float) -> Chain:
    """An order is recorded: what it holds the pool to holds from here on."""
    pool.audit.appendleft(write.record)
    if write.hold is None:
        return ()
    pool.hold = write.hold
    # Somebody who pins a paused pool wants it there now.
    return keep_to_pin(pool, now=now) if isinstance(write.request.wish, Pin) else ()


def keep_to_pin(pool: Pool, *, now: float) -> Chain:
    """Go where the pool is pinned, if it is elsewhere and can go. Level-triggered."""
    hold, current = pool.hold, pool.layouts.current
    if hold.pin is None or current is None or not pool.can_plan:
        return ()
    if current.same_placement(hold.pin) or not fits(hold.pin, current):
        return ()
    return adopt_given(pool, hold.pin, algorithm="pin", reason=f"pinned by {hold.pinned}", now=now)


def judged(
    pool: Pool, request: AdminRequest, proposal: Proposal, *, plan_ms: float, now: float
) -> Chain:
    """The plan that a wish asked for is there."""
    verdict = proposal.verdict
    if isinstance(request.wish, Preview):
        words = f"would be {'adopted' if verdict.accepted else 'refused'}: {verdict.reason}"
        outcome = Outcome(accepted=verdict.accepted, reason=words, proposal=proposal)
        return _answered(request, outcome, now=now)
    chain = decide(pool, proposal, plan_ms=plan_ms, now=now, was_asked_for=True)
    record = next(effect.record for effect in chain if isinstance(effect, WriteDecision))
    outcome = Outcome(
        accepted=record.accepted,
        reason=record.reason,
        generation=proposal.waves[-1].generation if record.accepted else 0,
    )
    return (*_answered(request, outcome, now=now), *chain)


def resume_postponed(pool: Pool, *, now: float) -> Chain:
    """A plan has ended: orders that met it in the making are looked at as if they came now."""
    effects: list[Effect] = []
    while pool.postponed and not pool.is_proposing:
        order = pool.postponed.popleft()
        if now <= order.until_s:
            effects += administer(pool, order.request, now=now)
        else:
            words = "earlier plans took too long, and nobody may wait for this one any more"
            effects += _refused(order.request, words, now=now)
    return tuple(effects)


def not_planned(request: AdminRequest, *, reason: str, now: float) -> Chain:
    """The planner broke down, or took too long, on what a wish asked for."""
    return _refused(request, reason, now=now)


# Holding ------------------------------------------------------------------------------------------


def _pause(pool: Pool, request: AdminRequest, *, now: float) -> Chain:
    if pool.hold.paused:
        return _refused(request, f"it is paused already, by {pool.hold.paused}", now=now)
    rollout = pool.rollouts.current
    words = "planning is paused until it is resumed"
    if rollout is not None:
        words += f"; the rollout of generation {rollout.target.generation} comes to its end"
    outcome = Outcome(accepted=True, reason=words)
    return _answered(request, outcome, now=now, hold=replace(pool.hold, paused=request.by))


def _resume(pool: Pool, request: AdminRequest, *, now: float) -> Chain:
    if not pool.hold.paused:
        return _refused(request, "it is not paused", now=now)
    words = "planning goes on at the end of the interval"
    if pool.hold.pinned:
        words = f"no longer paused; still pinned by {pool.hold.pinned}"
    outcome = Outcome(accepted=True, reason=words)
    return _answered(request, outcome, now=now, hold=replace(pool.hold, paused=""))


def _pin(pool: Pool, request: AdminRequest, wish: Pin, *, now: float) -> Chain:
    current = pool.layouts.current
    if current is None:
        return _refused(request, f"the pool has no layout yet: {_trouble(pool)}", now=now)
    target = wish.layout or current
    if not fits(target, current):
        return _refused(request, _misfit(pool), now=now)
    generation = current.generation if wish.layout is None else wish.generation
    words = f"generation {current.generation} stays until it is unpinned"
    if not current.same_placement(target):
        when = "now" if pool.can_plan else f"as soon as it can ({_trouble(pool)})"
        words = f"the pool goes to the pinned placement {when} and stays until it is unpinned"
    hold = Hold(
        paused=pool.hold.paused, pinned=request.by, pin=target, pinned_generation=generation
    )
    outcome = Outcome(accepted=True, reason=words, generation=generation)
    return _answered(request, outcome, now=now, hold=hold)


def _unpin(pool: Pool, request: AdminRequest, *, now: float) -> Chain:
    if not pool.hold.pinned:
        return _refused(request, "it is not pinned", now=now)
    words = "planning goes on at the end of the interval"
    if pool.hold.paused:
        words = f"no longer pinned; still paused by {pool.hold.paused}"
    outcome = Outcome(accepted=True, reason=words)
    return _answered(request, outcome, now=now, hold=Hold(paused=pool.hold.paused))


# Moving -------------------------------------------------------------------------------------------


def _roll_back(pool: Pool, request: AdminRequest, wish: RollBack, *, now: float) -> Chain:
    current, target = pool.layouts.current, wish.layout
    if pool.hold.pinned:
        return _refused(request, f"unpin it first: pinned by {pool.hold.pinned}", now=now)
    if current is None or not pool.can_plan:
        return _refused(request, f"nothing can be rolled out now: {_trouble(pool)}", now=now)
    if not fits(target, current):
        return _refused(request, _misfit(pool), now=now)
    if current.same_placement(target):
        words = f"generation {current.generation}, which runs, places experts just so"
        return _refused(request, words, now=now)
    reason = f"back to the placement of generation {target.generation}, by {request.by}"
    chain = adopt_given(pool, target, algorithm="rollback", reason=reason, now=now)
    rollout = pool.rollouts.current
    assert rollout is not None, "placements differ, so there is a wave"
    goal = rollout.target.generation + pool.rollouts.waves_left
    words = f"generation {goal} places experts as generation {target.generation} did; "
    hold = None
    if wish.keep_planning:
        words += "planning goes on"
    elif pool.hold.paused:
        words += f"planning stays paused by {pool.hold.paused}"
    else:
        words += "planning is paused, because the next plan would undo it: resume it when you like"
        hold = replace(pool.hold, paused=f"{request.by} (rollback)")
    outcome = Outcome(accepted=True, reason=words, generation=goal)
    return (*_answered(request, outcome, now=now, hold=hold), *chain)


def _rebalance(pool: Pool, request: AdminRequest, wish: Rebalance, *, now: float) -> Chain:
    if pool.hold.reason:
        return _refused(request, f"resume or unpin it first: {pool.hold.reason}", now=now)
    if pool.is_proposing:
        return _postponed(pool, request, now=now)
    if not pool.can_plan:
        return _refused(request, f"nothing can be rolled out now: {_trouble(pool)}", now=now)
    policy = replace(pool.policy, cooldown_s=0.0, plan_below=1.0)
    if wish.force:
        policy = replace(policy, min_assignments=0.0, min_gain=0.0, payback_s=_A_DAY_S)
    chain = _plan(pool, request, policy=policy, now=now)
    pool.is_proposing = any(isinstance(effect, Propose) for effect in chain)
    return chain


def _postponed(pool: Pool, request: AdminRequest, *, now: float) -> Chain:
    if len(pool.postponed) >= MAX_POSTPONED:
        return _refused(request, f"{MAX_POSTPONED} orders wait for a plan already", now=now)
    until_s = now + pool.policy.plan_timeout_s
    pool.postponed.append(Postponed(request=request, until_s=until_s))
    return ()


def _plan(pool: Pool, request: AdminRequest, *, policy: Policy, now: float) -> Chain:
    """Have a plan made on the latest window that had traffic."""
    window = next((one for one in reversed(pool.windows) if one.assignments), None)
    if window is None or pool.loads is None or pool.layouts.current is None:
        words = f"no window with traffic has closed yet: {_trouble(pool)}"
        return _refused(request, words, now=now)
    wanted = proposal_request(pool, window, policy=policy, now=now)
    return (Propose(request=wanted, asked=request),)


_A_DAY_S = 86400.0


# Words --------------------------------------------------------------------------------------------


def _refused(request: AdminRequest, reason: str, *, now: float) -> Chain:
    return _answered(request, Outcome(accepted=False, reason=reason), now=now)


def _answered(
    request: AdminRequest, outcome: Outcome, *, now: float, hold: Hold | None = None
) -> Chain:
    """Recorded first: nothing that an operator ordered happens without a record of it."""
    record = AuditRecord(
        time_unix_s=now,
        who=request.who,
        what=request.what,
        accepted=outcome.accepted,
        outcome=outcome.reason,
    )
    return (WriteAudit(record=record, hold=hold, request=request, answer=outcome),)


def _trouble(pool: Pool) -> str:
    rollout = pool.rollouts.current
    if rollout is not None:
        return f"generation {rollout.target.generation} is being rolled out ({rollout.state})"
    return pool.diagnosis().reason or "the pool is settling: ask again in a moment"


def _misfit(pool: Pool) -> str:
    current = pool.layouts.current
    assert current is not None, "asked before"
    return (
        f"that layout is for other ranks or another model: the pool has {current.num_layers} "
        f"layers of {current.num_experts} experts on {current.num_ranks} ranks with "
        f"{current.num_slots} slots"
    )

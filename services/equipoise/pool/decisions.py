"""From a closed window to a verdict: what is asked of the planner, and what becomes of it."""

from equipoise.planning.expected_gain import too_soon_again
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal, ProposalRequest
from equipoise.policy.digest import digest
from equipoise.pool.effects import Chain, Effect, Propose, WriteAverage, WriteDecision
from equipoise.pool.loads import ClosedWindow, drop_old_tables
from equipoise.pool.pool import Pool
from equipoise.pool.promises import judge_rollout, watch_rollout
from equipoise.pool.records import DecisionRecord
from equipoise.pool.slow_workers import note_pace


def close_due_window(pool: Pool, *, now: float) -> Chain:
    """Close the window if it is due; with traffic in it and nothing in the way, have a plan made.

    A window without traffic gives no verdict: hours of idleness would push the useful ones out of
    the store.
    """
    loads, current = pool.loads, pool.layouts.current
    if loads is None or current is None or not loads.is_due(now=now):
        return ()
    pool.windows_closed += 1
    pool.revision += 1
    window = loads.close_window(number=pool.windows_closed, generation=current.generation, now=now)
    pool.windows.append(window)
    drop_old_tables(pool.windows)
    pool.tally.shifts += window.shift.detected
    effects: list[Effect] = [*judge_rollout(pool, window, now=now)]
    effects += note_pace(pool, window, now=now)
    if window.assignments and pool.can_think and not pool.is_proposing and not pool.hold.reason:
        if window.doubt:
            effects.append(_undecided(pool, window, now=now))
        else:
            pool.is_proposing = True
            request = proposal_request(pool, window, policy=pool.policy, now=now)
            effects.append(Propose(request=request))
    records = loads.records(now=now)
    effects += [WriteAverage(name=name, record=record) for name, record in records.items()]
    return tuple(effects)


def proposal_request(
    pool: Pool, window: ClosedWindow, *, policy: Policy, now: float
) -> ProposalRequest:
    """What is asked of the planner about a window, by `policy`."""
    loads, current, shape = pool.loads, pool.layouts.current, pool.roster.shape
    assert loads is not None, "a window was closed"
    assert current is not None, "a window was closed"
    assert shape is not None, "a window was closed"
    return ProposalRequest(
        current=current,
        average=loads.slow.at_risk(policy.risk_z),
        window=window.load,
        balancedness=window.balancedness,
        shift=window.shift,
        model=shape.model,
        topology=pool.roster.topology(),
        policy=policy,
        policy_hash=pool.in_force.digest if policy is pool.policy else digest(policy),
        first_generation=pool.layouts.next_generation,
        now=now,
        last_switch_s=pool.rollouts.last_switch_s,
    )


def decide(
    pool: Pool, proposal: Proposal, *, plan_ms: float, now: float, was_asked_for: bool = False
) -> Chain:
    """Record the verdict on a proposal, and roll it out if it is yes and still fits.

    One that an operator asked for is adopted although the pool is held meanwhile.
    """
    pool.is_proposing = False
    request, verdict = proposal.request, proposal.verdict
    accepted, reason = verdict.accepted, verdict.reason
    if accepted and pool.store_fault and pool.can_think:
        accepted, reason = False, f"the rollout waits for the store: {reason}"
    if accepted and not (pool.can_plan and pool.layouts.current is request.current):
        accepted, reason = False, f"the pool changed while this was planned: {reason}"
    if accepted and pool.hold.reason and not was_asked_for:
        accepted, reason = False, f"{pool.hold.reason} while this was planned: {reason}"
    if accepted and pool.in_force.digest != request.policy_hash and not was_asked_for:
        accepted, reason = False, f"the policy changed while this was planned: {reason}"
    again = pool.setbacks.wait(pool.policy, now=now) or too_soon_again(
        pool.policy,
        rolled_back_s=pool.rolled_back_s,
        shift_detected=request.shift.detected,
        now=now,
    )
    if accepted and again and not was_asked_for:
        accepted, reason = False, f"{again}: {reason}"
    decision = DecisionRecord(
        time_unix_s=now,
        accepted=accepted,
        reason=reason,
        base_generation=request.current.generation,
        balancedness_current=verdict.balancedness_current,
        balancedness_proposed=verdict.balancedness_proposed,
        moves=verdict.moves,
        bytes=verdict.bytes,
        algorithm=proposal.plan.algorithm.value,
        plan_ms=plan_ms,
        shift_detected=request.shift.detected,
        policy_hash=request.policy_hash,
    )
    pool.tally.decided(accepted=accepted, plan_s=plan_ms / 1000)
    if not accepted:
        return (WriteDecision(record=decision),)
    pool.verdict = decision
    watch_rollout(pool, proposal)
    started = pool.rollouts.start(proposal.waves, base=request.current, now=now)
    return (*pool.obey(started), WriteDecision(record=decision))


def _undecided(pool: Pool, window: ClosedWindow, *, now: float) -> WriteDecision:
    """No plan is made on such a window: what nobody told of would look idle, say."""
    current = pool.layouts.current
    assert current is not None, "a window was closed"
    pool.tally.declined += 1
    return WriteDecision(
        record=DecisionRecord(
            time_unix_s=now,
            accepted=False,
            reason=f"nothing is planned on this window: {window.doubt}",
            base_generation=current.generation,
            balancedness_current=window.balancedness,
            balancedness_proposed=window.balancedness,
            shift_detected=window.shift.detected,
            policy_hash=pool.in_force.digest,
        )
    )


def late_decisions(pool: Pool) -> Chain:
    """Verdicts that the store could not take when they were given, once it works again."""
    if pool.store_fault or not pool.late:
        return ()
    late = tuple(WriteDecision(record=record) for record in pool.late)
    pool.late.clear()
    return late

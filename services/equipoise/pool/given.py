"""Rolling out a placement that no planner chose: an operator's, or one to go back to."""

from equipoise.planning.layout import Layout
from equipoise.planning.layout_proposal import propose_layout
from equipoise.pool.effects import Chain, WriteDecision
from equipoise.pool.pool import Pool
from equipoise.pool.records import DecisionRecord


def adopt_given(pool: Pool, target: Layout, *, algorithm: str, reason: str, now: float) -> Chain:
    """Begin an ordinary rollout, wave by wave, to the placement of `target` as a new generation.

    `pool.can_plan` must hold and `target` fit what runs. `algorithm` is what the decision shows in
    place of a planner's: "rollback" or "pin".
    """
    current, shape = pool.layouts.current, pool.roster.shape
    assert pool.can_plan, "asked before"
    assert current is not None, "a pool that can plan has a layout"
    assert shape is not None, "a pool that can plan has a shape"
    given = propose_layout(
        current,
        target,
        window=pool.windows[-1].load if pool.windows else None,
        model=shape.model,
        policy=pool.policy,
        first_generation=pool.layouts.next_generation,
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
        plan_ms=0.0,
        shift_detected=False,
    )
    pool.verdict = decision
    started = pool.rollouts.start(given.waves, base=current, now=now)
    return (*pool.obey(started), WriteDecision(record=decision))

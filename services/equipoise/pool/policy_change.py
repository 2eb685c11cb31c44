"""A pool follows its policy: what a change does to it, and its record."""

from equipoise.policy.digest import changes
from equipoise.pool.effects import Chain, WriteDecision
from equipoise.pool.pool import Pool
from equipoise.pool.records import DecisionKind, DecisionRecord


def follow_policy(pool: Pool, *, now: float) -> Chain:
    """Bring the policy in force into effect, and record it if it is another one than before.

    Nothing is lost by it: averages, windows and a rollout under way go on. A change that happened
    while no balancer led is recorded by the first one that does.
    """
    book = pool.policies
    if pool.policy_revision == book.revision:
        return ()
    pool.policy_revision = book.revision
    pool.revision += 1
    before, after = pool.in_force, book.of(pool.name)
    pool.adopt_policy(after, now=now)
    recorded, pool.recorded_policy = pool.recorded_policy, after.digest
    if recorded in {"", after.digest}:
        return ()
    differences = changes(before.values, after.values)
    what = ", ".join(differences) if differences else "it changed while no balancer led"
    record = DecisionRecord(
        kind=DecisionKind.POLICY,
        time_unix_s=now,
        accepted=True,
        reason=f"policy {after.digest} of {after.source} instead of {recorded}: {what}",
        base_generation=pool.layouts.stored_generation or 0,
        policy_hash=after.digest,
    )
    return (WriteDecision(record=record),)

"""Workers that compute slower than their peers: noting them, and by policy going on without them.

Which are slow is `planning/slowness.py`'s decision, when an epoch opens without them
`planning/membership.py`'s.
"""

from collections.abc import Mapping

from equipoise.planning.policy import SlowWorkerAction
from equipoise.planning.slowness import find_slow
from equipoise.pool.effects import Chain, Log
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.pool import Exclusion, Pool


def note_pace(pool: Pool, window: ClosedWindow, *, now: float) -> Chain:
    """A window has closed: see who is slow now."""
    if window.pace is not None:
        pool.paces.append(window.pace)
    logs: list[Log] = []
    before, pool.slow = pool.slow, find_slow(pool.paces, policy=pool.policy)
    for rank, slow in pool.slow.items():
        member = pool.roster.member_at(rank)
        if rank not in before:
            logs.append(
                Log(
                    text=f"{slow.reason} ({member.name})",
                    is_warning=True,
                    rank=rank,
                    epoch=pool.roster.epoch,
                    worker=member.name,
                )
            )
            pool.tally.slow_found += 1
    for member in pool.roster.seated():
        # Of those that serve, only who is slow now is to go.
        pool.excluded.pop(member.name, None)
        found = pool.slow.get(member.rank) if member.rank is not None else None
        if found and pool.policy.slow_worker_action is SlowWorkerAction.EXCLUDE:
            until_s = now + pool.policy.slow_worker_probation_s
            pool.excluded[member.name] = Exclusion(until_s=until_s, reason=found.reason)
    return tuple(logs)


def excluded_workers(pool: Pool, *, now: float) -> Mapping[str, str]:
    """Workers that take no part for now, and why; whose probation is over is let in again."""
    for name, exclusion in list(pool.excluded.items()):
        if now >= exclusion.until_s:
            del pool.excluded[name]
    return {name: exclusion.reason for name, exclusion in pool.excluded.items()}


def need_excluded(pool: Pool) -> Chain:
    """Too few are left without them: slow is better than down."""
    if not pool.excluded:
        return ()
    pool.excluded.clear()
    return (Log(text="excluded workers are needed after all", is_warning=True),)

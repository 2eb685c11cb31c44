"""Workers that compute slower than their peers: noting them, and by policy going on without them.

Which are slow is `planning/slowness.py`'s decision, when an epoch opens without them
`planning/membership.py`'s.
"""

import logging
from collections.abc import Mapping

from equipoise.balancer.pool.loads import ClosedWindow
from equipoise.balancer.pool.pool import Exclusion, Pool
from equipoise.planning.policy import SlowWorkerAction
from equipoise.planning.slowness import find_slow
from equipoise.telemetry.logs import about

_log = logging.getLogger(__name__)


def note_pace(pool: Pool, window: ClosedWindow, *, now: float) -> None:
    """A window has closed: see who is slow now."""
    if window.pace is not None:
        pool.paces.append(window.pace)
    before, pool.slow = pool.slow, find_slow(pool.paces, policy=pool.policy)
    for rank, slow in pool.slow.items():
        member = pool.roster.member_at(rank)
        if rank not in before:
            fields = about(pool=pool.name, rank=rank, epoch=pool.roster.epoch, worker=member.name)
            _log.warning("%s: %s (%s)", pool.name, slow.reason, member.name, extra=fields)
            pool.tally.slow_found += 1
    for member in pool.roster.seated():
        # Of those that serve, only who is slow now is to go.
        pool.excluded.pop(member.name, None)
        found = pool.slow.get(member.rank) if member.rank is not None else None
        if found and pool.policy.slow_worker_action is SlowWorkerAction.EXCLUDE:
            until_s = now + pool.policy.slow_worker_probation_s
            pool.excluded[member.name] = Exclusion(until_s=until_s, reason=found.reason)


def excluded_workers(pool: Pool, *, now: float) -> Mapping[str, str]:
    """Workers that take no part for now, and why; whose probation is over is let in again."""
    for name, exclusion in list(pool.excluded.items()):
        if now >= exclusion.until_s:
            del pool.excluded[name]
    return {name: exclusion.reason for name, exclusion in pool.excluded.items()}


def need_excluded(pool: Pool) -> None:
    """Too few are left without them: slow is better than down."""
    if pool.excluded:
        _log.warning("%s: excluded workers are needed after all", pool.name)
        pool.excluded.clear()

"""Workers whose stream is open and who say nothing: noting them, and what a rollout loses by it."""

from equipoise.planning.liveness import alive
from equipoise.planning.rollout import RankLost
from equipoise.pool.effects import Chain, Effect
from equipoise.pool.pool import Pool


def silent_workers(pool: Pool, *, now: float) -> frozenset[str]:
    """Names of those that have not spoken for too long.

    Asked at every tick, so it looks at each worker only when one of them can have fallen silent.
    """
    if now <= pool.quiet_until_s:
        return frozenset()
    silent_after_s = pool.silent_after_s
    connected = [member for member in pool.roster.members.values() if member.connected]
    silent = frozenset(
        member.name for member in connected if now - member.last_heard_s > silent_after_s
    )
    if not silent:
        oldest_s = min((member.last_heard_s for member in connected), default=now)
        pool.quiet_until_s = oldest_s + silent_after_s
    return silent


def note_silence(pool: Pool, *, now: float) -> Chain:
    """Ranks that fell silent are lost to a rollout; they count again when they speak."""
    if not silent_workers(pool, now=now) and not pool.silent:
        return ()
    heard_s = {
        member.rank: member.last_heard_s
        for member in pool.roster.seated()
        if member.connected and member.rank is not None
    }
    silent = alive(heard_s, now=now, silent_after_s=pool.silent_after_s).silent
    fell_silent = [rank for rank in silent if rank not in pool.silent]
    if silent.keys() != pool.silent.keys():
        pool.revision += 1
    pool.silent = silent
    effects: list[Effect] = []
    for rank in fell_silent:
        pool.bounds.note("report", silent[rank])
        effects += pool.roll(RankLost(rank=rank, reason=silent[rank]), now=now)
    return tuple(effects)

"""`Attendance`: workers that are connected but silent, and workers excluded for being slow.

`planning/slowness.py` decides which ranks are slow, `planning/membership.py` when an epoch opens
without them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from equipoise.planning.policy import SlowWorkerAction
from equipoise.planning.rollout import RankLost
from equipoise.planning.slowness import SlowRank
from equipoise.pool.counters import Counters
from equipoise.pool.effects import Chain, Log
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.policy import PoolPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exclusion:
    """A worker gets no rank until a time, and why: in which epoch it was slow, and how."""

    until_s: float
    epoch: int
    reason: str


class Attendance:
    """Which of the connected workers take part."""

    def __init__(self, policy: PoolPolicy, *, roster: Roster, counters: Counters) -> None:
        self._policy = policy
        self._roster = roster
        self._timeouts = counters.timeouts
        self.silent: Mapping[int, str] = {}
        """Ranks that sent nothing, or nothing valid, for too long, each with a message."""
        self._excluded: dict[str, _Exclusion] = {}
        # No worker can count as silent before that.
        self._quiet_until_s = -math.inf

    @property
    def excluded(self) -> Mapping[str, str]:
        """Workers that have no rank for now because they were slow: in what, and until when."""
        ranks = {member.name for member in self._roster.seated()}
        return {
            name: f"it was slow in epoch {one.epoch} ({one.reason}); it may return at "
            f"{datetime.fromtimestamp(one.until_s, UTC):%H:%M:%S} UTC"
            for name, one in self._excluded.items()
            if name not in ranks
        }

    @property
    def silent_after_s(self) -> float:
        """Silence that counts. Workers keep their heartbeat interval until they join an epoch."""
        policy = self._policy.values
        sent_s = max((one.heartbeat_s for one in self._roster.members.values()), default=0.0)
        if sent_s <= policy.heartbeat_interval_s:
            return policy.report_timeout_s
        return max(policy.report_timeout_s, 2 * sent_s)

    def look_again(self) -> None:
        """Members or the policy changed: a worker may count as silent sooner."""
        self._quiet_until_s = -math.inf

    def begin_epoch(self) -> None:
        """No rank of the new epoch is silent yet."""
        self.silent = {}
        self.look_again()

    def note_silence(self, *, now: float) -> Sequence[RankLost]:
        """Look for silent ranks; returns those that were not silent before.

        They count again once they report.
        """
        if not self.silent_workers(now=now) and not self.silent:
            return ()
        before, most_s = self.silent, self.silent_after_s
        self.silent = {
            member.rank: _silence(member, silent_s=silent_s, most_s=most_s)
            for member in self._roster.seated()
            if member.connected and member.rank is not None
            if (silent_s := now - member.last_heard_s) > most_s
        }
        fallen = [rank for rank in self.silent if rank not in before]
        for rank in fallen:
            self._timeouts.note("report", self.silent[rank])
        return [RankLost(rank=rank, reason=self.silent[rank]) for rank in fallen]

    def silent_workers(self, *, now: float) -> frozenset[str]:
        """Names of workers that sent nothing for too long.

        It runs at every tick, so it looks at each worker only when one can have fallen silent.
        """
        if now <= self._quiet_until_s:
            return frozenset()
        silent_after_s = self.silent_after_s
        connected = [member for member in self._roster.members.values() if member.connected]
        silent = frozenset(
            member.name for member in connected if now - member.last_heard_s > silent_after_s
        )
        if not silent:
            oldest_s = min((member.last_heard_s for member in connected), default=now)
            self._quiet_until_s = oldest_s + silent_after_s
        return silent

    def excluded_workers(self, *, now: float) -> Mapping[str, str]:
        """Workers that get no rank for now, and why; those whose probation is over may return."""
        self._excluded = {name: one for name, one in self._excluded.items() if now < one.until_s}
        return {name: exclusion.reason for name, exclusion in self._excluded.items()}

    def exclude_slow(
        self, slow: Mapping[int, SlowRank], *, found: Sequence[SlowRank], now: float
    ) -> Chain:
        """A window has closed: report ranks newly `found`, and by policy exclude `slow` ones."""
        policy = self._policy.values
        for member in self._roster.seated():
            # Of members that serve, only those that are slow now are excluded.
            self._excluded.pop(member.name, None)
            one = slow.get(member.rank) if member.rank is not None else None
            if one and policy.slow_worker_action is SlowWorkerAction.EXCLUDE:
                until_s = now + policy.slow_worker_probation_s
                self._excluded[member.name] = _Exclusion(
                    until_s=until_s, epoch=self._roster.epoch, reason=one.reason
                )
        return tuple(self._warning(one) for one in found)

    def _warning(self, slow: SlowRank) -> Log:
        worker = self._roster.name_at(slow.rank)
        return Log(
            text=f"{slow.reason} ({worker})",
            is_warning=True,
            rank=slow.rank,
            epoch=self._roster.epoch,
            worker=worker,
        )

    def recall_excluded(self) -> Chain:
        """Too few workers are left without the slow ones: slow is better than down."""
        if not self._excluded:
            return ()
        self._excluded.clear()
        return (Log(text="excluded workers are needed after all", is_warning=True),)


def _silence(member: Member, *, silent_s: float, most_s: float) -> str:
    what = "sent no valid heartbeat" if member.rejected else "been silent"
    latest = member.rejected and f"; the latest message was rejected: {member.rejected}"
    return (
        f"rank {member.rank} has {what} for {silent_s:.1f} s, more than the allowed {most_s:g} s"
        f"{latest}"
    )

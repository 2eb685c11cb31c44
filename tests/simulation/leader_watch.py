"""`LeaderWatch`: every wait of a leader is bounded, and says so when its bound is reached.

It looks at the balancer that leads twice a second. What a leader could not do while it was paused,
or while the store or the network failed it, does not count.
"""

from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from equipoise.planning.phase import Phase
from equipoise.planning.ratio import MAX_GROWTH
from equipoise.planning.rollout import State
from tests.simulation.fleet import POOL, SLOTS
from tests.simulation.loop import Process, outside
from tests.simulation.store import NAME

LOOK_S = 0.5
SLACK_S = 1.5
"""Seconds that a tick and a message may take beyond a bound."""

WRITTEN_S = 2.5
"""Seconds in which a leader writes an epoch to a store that works."""

MAX_ACCEPTED = 64
"""Epochs whose records are remembered: the one that a leader is in is among the latest."""

_TIMEOUTS = {
    State.PLANNED: "stage_timeout_s",
    State.STAGING: "stage_timeout_s",
    State.STAGED: "switch_timeout_s",
}


class LeaderWatch:
    """Looks at the leader of one world, from the start of the schedule to its end."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._hindered_s: dict[Process, float] = {}
        self._unwritten: tuple[Process, int, int] | None = None
        self._unwritten_s = 0.0
        self._accepted: deque[tuple[int, int, tuple[str, ...]]] = deque(maxlen=MAX_ACCEPTED)
        self._planned: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def begin(self) -> None:
        """Look once, and again after a while."""
        self._look()
        self._world.loop.call_later(LOOK_S, self.begin, context=outside())

    def accepted(self, term: int, members: Any) -> None:
        """The store has recorded the members of an epoch."""
        self._accepted.append((term, members.epoch, members.workers))

    def _look(self) -> None:
        now_s = self._world.loop.time()
        for one in self._world.living_balancers():
            if one.process.paused:
                self._hindered_s[one.process] = now_s
        leader = self._world.leader()
        pools = leader.seat.led if leader is not None else None
        if leader is None or leader.process.paused or pools is None or POOL not in pools.names():
            self._unwritten = None
            return
        pool = pools.find(POOL).pool
        self._watch_plans(pool)
        self._check_epoch(leader, pool, pools.term, now_s)
        if now_s > self._hindered_s.get(leader.process, 0.0) + SLACK_S:
            self._check_wave(leader, pool)
            self._check_advice(pool)
            self._check_silence(leader, pool)

    def _check_epoch(self, leader: Any, pool: Any, term: int, now_s: float) -> None:
        """An epoch that the leader opened is in the store soon after the store works."""
        stored = self._world.store.data.get(("members", POOL))
        newest = pool.roster.epoch  # 0 while the leader waits for ranks of a store that is empty
        # An epoch that was found is recorded once all its ranks have said what they run.
        is_known = newest and (pool.roster.opened_here or pool.roster.complete)
        is_stored = not is_known or (stored is not None and stored.epoch >= newest)
        opened = leader.process, term, pool.roster.epoch
        if is_stored or self._is_lost(pool, term) or not self._is_store_near(leader):
            self._unwritten = None
        elif opened != self._unwritten:
            self._unwritten, self._unwritten_s = opened, now_s
        elif now_s > self._unwritten_s + WRITTEN_S:
            self._world.observer.violate(
                "epoch-not-written",
                f"{leader.process.name} has not written epoch {pool.roster.epoch} for "
                f"{now_s - self._unwritten_s:.1f} s, although the store works",
            )

    def _is_lost(self, pool: Any, term: int) -> bool:
        """Whether the store accepted the epoch, and lost it: a leader notices at its next write.

        An epoch that the leader found was written in an earlier term.
        """
        members = pool.roster.epoch_members()
        terms = {
            by
            for by, epoch, workers in self._accepted
            if epoch == members.epoch and set(members.workers) <= set(workers)  # Some may be gone.
        }
        return term in terms if pool.roster.opened_here else bool(terms)

    def _is_store_near(self, leader: Any) -> bool:
        world, name = self._world, leader.process.name
        is_cut = world.network.is_cut(name, NAME) or world.network.is_cut(NAME, name)
        store = world.store
        is_broken = store.is_down or store.hangs or store.is_full or store.answers_late
        return not is_broken and not is_cut and world.network.delay_factor == 1.0

    def _watch_plans(self, pool: Any) -> None:
        """Note in which epoch each plan of a pool begins: a wave may be over before it is seen."""
        rollouts = pool.rollouts
        if rollouts in self._planned:
            return
        self._planned[rollouts] = pool.roster.epoch
        for name in ("start", "resume"):
            setattr(rollouts, name, self._noting(pool, getattr(rollouts, name)))

    def _noting(self, pool: Any, begin: Any) -> Any:
        def noted(*args: Any, **about: Any) -> Any:
            self._planned[pool.rollouts] = pool.roster.epoch
            return begin(*args, **about)

        return noted

    def _check_wave(self, leader: Any, pool: Any) -> None:
        """A wave leaves its state in time, and ends with the epoch that it was planned for."""
        wave = pool.rollouts.current
        if wave is None:
            return
        planned = self._planned[pool.rollouts]
        if planned != pool.roster.epoch:
            self._world.observer.violate(
                "wave-of-another-epoch",
                f"generation {wave.target.generation} was planned in epoch {planned} and is "
                f"{wave.state} in epoch {pool.roster.epoch}",
            )
        waited_s = leader.clock() - wave.entered_s
        bound = _TIMEOUTS.get(wave.state)
        if bound is not None and waited_s > getattr(wave.policy, bound) + SLACK_S:
            self._world.observer.violate(
                "wave-overdue",
                f"generation {wave.target.generation} is {wave.state} for {waited_s:.1f} s",
            )

    def _check_advice(self, pool: Any) -> None:
        """A number of ranks is advised for a phase, within its limits, with a reason; no token of
        its ranks counts twice."""
        advice, demand = pool.windows.advice, pool.windows._demand
        if advice is None or demand is None:
            return
        num_ranks = pool.roster.num_ranks
        is_in_range = not advice.ranks or 1 <= advice.ranks <= max(
            MAX_GROWTH * num_ranks, -(-self._world.shape.num_experts // SLOTS)
        )
        counted = demand._open.tokens + sum(one.tokens for one in demand._minutes)
        run = self._world.tokens_of_epoch[pool.roster.epoch]
        if self._world.phase is Phase.MIXED or not (is_in_range and advice.reason):
            self._world.observer.violate("bad-advice", f"{num_ranks} ranks: {advice}")
        elif counted > run:
            self._world.observer.violate(
                "tokens-twice",
                f"{counted} tokens count in epoch {pool.roster.epoch}, whose ranks ran {run}",
            )

    def _check_silence(self, leader: Any, pool: Any) -> None:
        """A rank that says nothing for too long is named."""
        bound_s = pool.attendance.silent_after_s + SLACK_S
        for member in pool.roster.seated():
            silent_s = leader.clock() - member.last_heard_s
            if (
                member.connected
                and silent_s > bound_s
                and member.rank not in pool.attendance.silent
            ):
                self._world.observer.violate(
                    "silence-unreported",
                    f"{member.name} (rank {member.rank}) said nothing for {silent_s:.1f} s",
                )

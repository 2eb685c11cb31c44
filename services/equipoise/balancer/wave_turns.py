"""`WaveTurns`: spaces out the waves of many pools, so that messages of workers come first.

A wave is a message to every rank of its pool, and two from each. Hundreds of pools whose traffic
shifts together have thousands of waves, which would keep the event loop from reports and
heartbeats for minutes.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from equipoise.planning.policy import Policy

SPACING_S = 0.002
"""Minimum time between two waves, seconds: the cost of a wave shows a little later."""

LAG_S = 0.02
"""A wave is pushed once gRPC takes at most this many seconds to send a message.

Timers would not show the load: gRPC hands few events to the event loop in each iteration, and keeps
the others, so that sleeping tasks wake in time.
"""

FIRST_LAG = 0.1
"""The same for the first wave of a plan, which an operator may wait for, as a fraction of the
heartbeat interval of its ranks."""

RANK_HOLD_S = 0.003
"""A wave is pushed at the latest this many seconds, times the ranks of the previous wave, after
that one: 200 pools of 32 ranks that roll out all get a turn within the default timeout."""

BEHIND_RANK_HOLD_S = 0.03
"""The same for later waves while plans that an operator requested are made: these begin first."""

MIN_HOLD_S, MAX_HOLD_S = 0.1, 1.0
"""Minimum and maximum of that wait, seconds, for any number of ranks."""

BEHIND_TIMEOUT = 0.25
"""Maximum time that a wave waits for requested plans, as a fraction of its staging timeout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    num_ranks: int
    first_lag_s: float | None
    behind_until_s: float
    may_go: asyncio.Future[bool]
    is_wanted: Callable[[], bool]


class WaveTurns:
    """Starts one wave after the other, as fast as the event loop keeps up.

    First waves of plans have priority; among equals the pool whose last wave is oldest is first, so
    that all plans begin before one continues. For one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, float, int, _Waiting]] = []
        self._numbers = itertools.count()
        self._went_s: dict[str, float] = {}
        self._letting: asyncio.Task[None] | None = None
        self._num_expected = 0
        self._lag_s = 0.0

    def note_lag(self, lag_s: float) -> None:
        """The latest message to a worker took `lag_s` to be sent."""
        self._lag_s = lag_s

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Inside the block a requested plan is made, so that a first wave may come."""
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1

    def forget(self, pool: str) -> None:
        """A pool is dropped."""
        self._went_s.pop(pool, None)

    async def turn(
        self,
        pool: str,
        *,
        num_ranks: int,
        is_first: bool,
        policy: Policy,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Wait until a wave of `pool` may go; `is_first` if it is the first of its plan.

        Returns False if `is_wanted` is false by then; that takes no turn.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(
            num_ranks=num_ranks,
            first_lag_s=FIRST_LAG * policy.heartbeat_interval_s if is_first else None,
            behind_until_s=loop.time() + BEHIND_TIMEOUT * policy.stage_timeout_s,
            may_go=loop.create_future(),
            is_wanted=is_wanted,
        )
        went_s = self._went_s.get(pool, -math.inf)
        heapq.heappush(self._waiting, (not is_first, went_s, next(self._numbers), waiting))
        if self._letting is None or self._letting.done():
            self._letting = asyncio.create_task(self._let())
        if not await waiting.may_go:
            return False
        self._went_s[pool] = loop.time()
        return True

    async def _let(self) -> None:
        while self._waiting:
            *_, waiting = heapq.heappop(self._waiting)
            if waiting.may_go.done():
                continue  # Its pool has ended.
            is_wanted = waiting.is_wanted()
            waiting.may_go.set_result(is_wanted)
            if is_wanted:
                await self._caught_up(num_ranks=waiting.num_ranks)

    async def _caught_up(self, *, num_ranks: int) -> None:
        """Wait until the next wave may go after one to `num_ranks`."""
        loop = asyncio.get_running_loop()
        went_s = loop.time()
        may_go = False
        while not may_go:
            await asyncio.sleep(SPACING_S)
            lag_s, rank_hold_s = self._bounds(now_s=loop.time())  # The next wave may change.
            hold_s = min(MAX_HOLD_S, max(MIN_HOLD_S, num_ranks * rank_hold_s))
            may_go = self._lag_s <= lag_s or loop.time() >= went_s + hold_s

    def _bounds(self, *, now_s: float) -> tuple[float, float]:
        """How far messages may lag when the next wave is pushed, and its maximum wait per rank."""
        if not self._waiting:
            return LAG_S, RANK_HOLD_S
        waiting = self._waiting[0][-1]
        if waiting.first_lag_s is not None:
            return waiting.first_lag_s, RANK_HOLD_S
        if self._num_expected and now_s < waiting.behind_until_s:
            return -math.inf, BEHIND_RANK_HOLD_S
        return LAG_S, RANK_HOLD_S

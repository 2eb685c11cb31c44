"""`WaveTurns`: when the waves of many pools go out, so that hearing workers comes first.

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
"""Least seconds from one wave to the next: what it costs shows a little later."""


LAG_S = 0.02
"""A wave goes once gRPC says after so long at most that a message went.

That is looked at, because whoever sleeps is woken in time however much waits: gRPC hands few events
to the event loop in each of its turns, and keeps the others.
"""

FIRST_LAG = 0.1
"""The same for a wave with which a plan begins, because somebody may wait for it: so much of the
time in which its ranks say that they live."""

RANK_HOLD_S = 0.003
"""A wave goes in any case so long after the one before it for each rank that this was sent to,
because a wave that waits has a bound: of 200 pools of 32 ranks that roll out, each has its turn
within the usual one."""

BEHIND_RANK_HOLD_S = 0.03
"""The same for waves with which plans go on, while others that somebody ordered are made: these
are to begin first."""

MIN_HOLD_S, MAX_HOLD_S = 0.1, 1.0
"""And not sooner, or later, to however few or many ranks the one before it went."""

BEHIND_BOUND = 0.25
"""So much of the bound within which a wave must be staged it waits for plans that somebody ordered,
at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    num_ranks: int
    first_lag_s: float | None
    behind_until_s: float
    may_go: asyncio.Future[bool]
    is_wanted: Callable[[], bool]


class WaveTurns:
    """Lets one wave go after the other, as fast as the event loop keeps up.

    First waves of plans go before others, and else those of the pool whose last wave is longest
    ago, so that all begin before one goes on. Used from one event loop.
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
        """Within the block a plan is made that somebody ordered, so that a first wave may come."""
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1

    async def turn(
        self,
        pool: str,
        *,
        num_ranks: int,
        is_first: bool,
        policy: Policy,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Wait until a wave of `pool` may go, which `is_first` of its plan or not.

        False if it is not wanted any more then, as `is_wanted` says; that takes nobody's time.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(
            num_ranks=num_ranks,
            first_lag_s=FIRST_LAG * policy.heartbeat_interval_s if is_first else None,
            behind_until_s=loop.time() + BEHIND_BOUND * policy.stage_timeout_s,
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
                continue  # Its pool is no more.
            is_wanted = waiting.is_wanted()
            waiting.may_go.set_result(is_wanted)
            if is_wanted:
                await self._caught_up(num_ranks=waiting.num_ranks)

    async def _caught_up(self, *, num_ranks: int) -> None:
        """Wait until the next one may go after one to so many ranks."""
        loop = asyncio.get_running_loop()
        went_s = loop.time()
        may_go = False
        while not may_go:
            await asyncio.sleep(SPACING_S)
            lag_s, rank_hold_s = self._bounds(now_s=loop.time())  # Who is next may change.
            hold_s = min(MAX_HOLD_S, max(MIN_HOLD_S, num_ranks * rank_hold_s))
            may_go = self._lag_s <= lag_s or loop.time() >= went_s + hold_s

    def _bounds(self, *, now_s: float) -> tuple[float, float]:
        """How far messages may lag when the wave that is next goes, and how long that waits."""
        if not self._waiting:
            return LAG_S, RANK_HOLD_S
        waiting = self._waiting[0][-1]
        if waiting.first_lag_s is not None:
            return waiting.first_lag_s, RANK_HOLD_S
        if self._num_expected and now_s < waiting.behind_until_s:
            return -math.inf, BEHIND_RANK_HOLD_S
        return LAG_S, RANK_HOLD_S

"""`WaveTurns`: when the waves of many pools go out, so that hearing workers comes first.

A wave is a message to every rank of its pool, and two from each. Hundreds of pools whose traffic
shifts together have thousands of waves, which would keep the event loop from reports and
heartbeats for minutes.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

LAG_S = 0.02
"""The balancer keeps up if gRPC says after so long at most that a message went.

Whoever sleeps is woken in time however much waits: gRPC hands few events to the event loop in each
of its turns, and keeps the others.
"""

SPACING_S = 0.002
"""Least seconds from one wave to the next: what it costs shows a little later."""

MAX_HOLD_S = 0.1
"""Longest time from one wave to the next while others wait, however far the balancer lags: a wave
that waits has a bound, and of 200 pools that roll out each has its turn within the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    may_go: asyncio.Future[bool]
    is_wanted: Callable[[], bool]


class WaveTurns:
    """Lets one wave go after the other, as fast as the event loop keeps up.

    The pool whose last wave is longest ago goes first, so that all begin before one goes on. Used
    from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, _Waiting]] = []
        self._numbers = itertools.count()
        self._went_s: dict[str, float] = {}
        self._letting: asyncio.Task[None] | None = None
        self.lag_s = 0.0
        """How long the latest message to a worker took to go."""

    async def turn(self, pool: str, *, is_wanted: Callable[[], bool]) -> bool:
        """Wait until a wave of `pool` may go: at most `MAX_HOLD_S` for each other pool.

        False if it is not wanted any more then, as `is_wanted` says; that takes nobody's time.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(may_go=loop.create_future(), is_wanted=is_wanted)
        went_s = self._went_s.get(pool, -math.inf)
        heapq.heappush(self._waiting, (went_s, next(self._numbers), waiting))
        if self._letting is None or self._letting.done():
            self._letting = asyncio.create_task(self._let())
        if not await waiting.may_go:
            return False
        self._went_s[pool] = loop.time()
        return True

    async def _let(self) -> None:
        while self._waiting:
            _, _, waiting = heapq.heappop(self._waiting)
            if waiting.may_go.done():
                continue  # Its pool is no more.
            is_wanted = waiting.is_wanted()
            waiting.may_go.set_result(is_wanted)
            if is_wanted:
                await self._caught_up()

    async def _caught_up(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MAX_HOLD_S
        await asyncio.sleep(SPACING_S)
        while self.lag_s > LAG_S and loop.time() < until_s:  # noqa: ASYNC110 - it is a number
            await asyncio.sleep(SPACING_S)

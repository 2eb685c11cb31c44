"""`WaveTurns`: when the waves of many pools go out, so that hearing workers comes first.

A wave is a message to every rank of its pool, and two from each. Hundreds of pools whose traffic
shifts together have thousands of waves, which would keep the event loop from reports and
heartbeats for minutes.
"""

import asyncio
import heapq
import itertools
import math

LAG_S = 0.02
"""The balancer keeps up if gRPC says after so long at most that a message went.

Whoever sleeps is woken in time however much waits: gRPC hands few events to the event loop in each
of its turns, and keeps the others.
"""

SPACING_S = 0.002
"""Least seconds from one wave to the next: what it costs shows a little later."""

MAX_HOLD_S = 0.1
"""Longest time from one wave to the next while others wait, however far the event loop lags: of 300
pools each has its turn within the bounds of a wave."""


class WaveTurns:
    """Lets one wave go after the other, as fast as the event loop keeps up.

    The pool whose last wave is longest ago goes first, so that all begin before one goes on. Used
    from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._went_s: dict[str, float] = {}
        self._letting: asyncio.Task[None] | None = None
        self.lag_s = 0.0
        """How long the latest message to a worker took to go."""

    async def turn(self, pool: str) -> None:
        """Wait until a wave of `pool` may go: at most `MAX_HOLD_S` for each other pool."""
        loop = asyncio.get_running_loop()
        may_go: asyncio.Future[None] = loop.create_future()
        went_s = self._went_s.get(pool, -math.inf)
        heapq.heappush(self._waiting, (went_s, next(self._numbers), may_go))
        if self._letting is None or self._letting.done():
            self._letting = asyncio.create_task(self._let())
        await may_go
        self._went_s[pool] = loop.time()

    async def _let(self) -> None:
        while self._waiting:
            _, _, may_go = heapq.heappop(self._waiting)
            if may_go.done():
                continue  # Its pool is no more.
            may_go.set_result(None)
            await self._caught_up()

    async def _caught_up(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MAX_HOLD_S
        await asyncio.sleep(SPACING_S)
        while self.lag_s > LAG_S and loop.time() < until_s:  # noqa: ASYNC110 - it is a number
            await asyncio.sleep(SPACING_S)

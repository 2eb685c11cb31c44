"""`WaveTurns`: when the waves of many pools go out, so that hearing workers comes first.

A wave is a message to every rank of its pool, and two from each. Hundreds of pools whose traffic
shifts together have thousands of waves, which would keep the event loop from reports and
heartbeats for minutes.
"""

import asyncio
import heapq
import itertools
import math

LAG_S = 0.01
"""The event loop keeps up if whoever sleeps is woken so late at most."""

SPACING_S = 0.002
"""Least seconds from one wave to the next: what it costs shows a little later."""

MAX_WAIT_S = 5.0
"""Longest wait for a turn. Whoever has waited so long goes: a wave has bounds of its own."""


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

    async def turn(self, pool: str) -> None:
        """Wait until a wave of `pool` may go, or for `MAX_WAIT_S`."""
        loop = asyncio.get_running_loop()
        may_go: asyncio.Future[None] = loop.create_future()
        went_s = self._went_s.get(pool, -math.inf)
        heapq.heappush(self._waiting, (went_s, next(self._numbers), may_go))
        if self._letting is None or self._letting.done():
            self._letting = asyncio.create_task(self._let())
        await asyncio.wait({may_go}, timeout=MAX_WAIT_S)
        may_go.cancel()
        self._went_s[pool] = loop.time()

    async def _let(self) -> None:
        while self._waiting:
            _, _, may_go = heapq.heappop(self._waiting)
            if may_go.done():
                continue  # It has waited long enough.
            may_go.set_result(None)
            await _caught_up()


async def _caught_up() -> None:
    loop = asyncio.get_running_loop()
    late_s = math.inf
    while late_s > LAG_S:
        due_s = loop.time() + SPACING_S
        await asyncio.sleep(SPACING_S)
        late_s = loop.time() - due_s

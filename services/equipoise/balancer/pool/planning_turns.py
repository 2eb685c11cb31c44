"""`PlanningTurns`: how many plans are computed at once, whatever their pools.

Hundreds of pools end their windows together; as many threads would take the processors from the
event loop, which hears the workers.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_AT_ONCE = max(1, (os.cpu_count() or 1) - 1)
"""Plans under way at a time, of all pools: one processor is left to the event loop."""

TURN_S = 5.0
"""Longest turn, seconds. A plan that takes longer goes on, but others no longer wait for it."""


class PlanningTurns:
    """Turns in the order in which they were asked for. Used from one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_AT_ONCE)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it inside the block, or for `TURN_S`."""
        await self._free.acquire()
        is_held = True

        def give_back() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        bound = asyncio.get_running_loop().call_later(TURN_S, give_back)
        try:
            yield
        finally:
            bound.cancel()
            give_back()

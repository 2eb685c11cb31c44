"""`PlanningTurns`: how many plans are computed at once, whatever their pools.

Hundreds of pools end their windows together; as many plans at once would take the processors from
the event loop, which hears the workers.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_MAX_AT_ONCE = 4
"""However many processors there are: a container that only asks for a part of a large machine,
without a limit, sees all of it."""


def num_at_once(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Plans under way at a time, of all pools: one processor is left to the event loop.

    Its precedence over the processes that plan is not enough: with one of them on each of two
    processors reports took three times as long. Processors are those that this process may use,
    and no more than the quota of its control group, which `cpu_max` tells as cgroup v2 has it; one
    that cannot be read is none.
    """
    num_processors = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            num_processors = min(num_processors, int(quota) / int(period))
    return min(_MAX_AT_ONCE, max(1, int(num_processors) - 1))


MAX_AT_ONCE = num_at_once()

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

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

SPACING_S = 0.002
"""Least seconds from one wave to the next: what it costs shows a little later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A wave goes once gRPC says after `lag_s` at most that a message went.

    It goes in any case `rank_hold_s` after the one before it for each rank that this was sent to,
    because a wave that waits has a bound: of 200 pools of 32 ranks that roll out, each has its turn
    within the usual one. The lag is looked at there, because whoever sleeps is woken in time
    however much waits: gRPC hands few events to the event loop in each of its turns, and keeps the
    others.
    """

    lag_s: float
    rank_hold_s: float


FIRST = Pace(lag_s=0.5, rank_hold_s=0.003)
"""Waves with which a plan begins: somebody may wait for it."""

NEXT = Pace(lag_s=0.02, rank_hold_s=0.003)
"""Waves with which it goes on."""

BEHIND = Pace(lag_s=-math.inf, rank_hold_s=0.03)
"""The same, while plans that somebody ordered are made: theirs are to begin first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    num_ranks: int
    is_first: bool
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
        self.lag_s = 0.0
        """How long the latest message to a worker took to go."""

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Within the block a plan is made that somebody ordered, so that a first wave may come."""
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1

    async def turn(
        self, pool: str, *, num_ranks: int, is_first: bool, is_wanted: Callable[[], bool]
    ) -> bool:
        """Wait until a wave of `pool` may go, which `is_first` of its plan or not.

        False if it is not wanted any more then, as `is_wanted` says; that takes nobody's time.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(
            num_ranks=num_ranks,
            is_first=is_first,
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
            pace = self._pace()  # Who is next may be another one each time.
            held_s = loop.time() - went_s
            may_go = self.lag_s <= pace.lag_s or held_s >= num_ranks * pace.rank_hold_s

    def _pace(self) -> Pace:
        """That of the wave which is next."""
        if self._waiting and self._waiting[0][-1].is_first:
            return FIRST
        return BEHIND if self._num_expected and self._waiting else NEXT

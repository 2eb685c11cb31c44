"""`LoopShare`: the event loop's time that one pool may take.

Whatever a message contains, what it costs is measured: a limit of messages would have to know the
most expensive contents. Receiving it costs time outside the loop, so its bytes count, too. Who used
up the share waits, so that nothing is lost, and gRPC's flow control makes the sender wait.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from equipoise.balancer.by_pool import ByPool

SHARE_OF_LOOP = 0.5
"""Largest share of the event loop's time that goes to messages of one pool, in the long run. The
reports of 320 ranks, the most of a published deployment, take 0.035 at one per second each."""

BURST_S = 0.25
"""Seconds of the loop's time that a pool may take at once: the answers of 700 ranks to a wave."""

RECEIVING_S_PER_BYTE = 1 / (32 * 2**20)
"""What a received byte counts, beside the work on it: gRPC's threads and copies are not measured. A
pool thus sends at most 16 MiB/s in the long run."""

_TURN_S = 0.01
"""Seconds of the loop's time that who waits has earned when it goes on: a wait for each message
would cost more than the message."""


@dataclass(slots=True, kw_only=True)
class LoopBudget:
    """`share` of the time, `burst_s` at once; starts full. Pure: `now` is of a monotonic clock."""

    share: float = SHARE_OF_LOOP
    burst_s: float = BURST_S
    _left_s: float = field(init=False)
    _at_s: float = 0.0

    def __post_init__(self) -> None:
        assert 0 < self.share < 1, "the rest is for others"
        assert self.burst_s > 0, "something may be taken"
        self._left_s = self.burst_s

    def wait_s(self, *, now: float) -> float:
        """Seconds until something may be taken; 0 if it may now."""
        self._earn(now)
        return 0.0 if self._left_s > 0.0 else (_TURN_S - self._left_s) / self.share

    def take(self, spent_s: float, *, now: float) -> None:
        """Count time that was taken, however much; who owes waits."""
        self._earn(now)
        self._left_s -= spent_s

    def is_full(self, *, now: float) -> bool:
        """Whether it is as if nothing had ever been taken."""
        self._earn(now)
        return self._left_s >= self.burst_s

    def _earn(self, now: float) -> None:
        self._left_s = min(self.burst_s, self._left_s + max(0.0, now - self._at_s) * self.share)
        self._at_s = now


class LoopShare:
    """Gives the messages of one pool their turns, one at a time, in order of arrival.

    In one turn of the event loop at most one message of a pool is worked on, so those of others do
    not wait for more than that, however many streams it has.
    """

    def __init__(self) -> None:
        self.budget = LoopBudget()
        self._turn = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether a new one could take its place."""
        now_s = asyncio.get_running_loop().time()
        return not self._turn.locked() and self.budget.is_full(now=now_s)

    def received(self, num_bytes: int) -> None:
        """Count a message that has arrived; called before its turn."""
        now_s = asyncio.get_running_loop().time()
        self.budget.take(num_bytes * RECEIVING_S_PER_BYTE, now=now_s)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Count work for the pool that comes with no message, or cannot wait for its turn.

        It takes time of the loop whatever is left: the pool's next messages wait for it.
        """
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._count_since(began_s)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn of a message; the block is the work on it.

        The block must not wait: that would hold up the pool's other streams.
        """
        async with self._turn:
            # At least until the loop has come round: others are served between two messages.
            await asyncio.sleep(self.budget.wait_s(now=asyncio.get_running_loop().time()))
            # Of the thread, not of the clock: other processes are not this pool's fault.
            began_s = time.thread_time()
            try:
                yield
            finally:
                self._count_since(began_s)

    def _count_since(self, began_s: float) -> None:
        spent_s = time.thread_time() - began_s
        self.budget.take(spent_s, now=asyncio.get_running_loop().time())


class LoopShares(ByPool[LoopShare]):
    """The share of each pool."""

    def __init__(self) -> None:
        super().__init__(LoopShare)

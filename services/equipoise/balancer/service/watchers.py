"""`Watchers`: thousands of status streams that share one picture of each pool and take turns.

A balancer's event loop also answers workers. So a pool's status is encoded once for all who watch
it, and watchers are woken in small batches, which take at most a share of the loop's time.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from equipoise.balancer.failures import Failures
from equipoise.balancer.pools import PoolView
from equipoise_api.v1 import status_pb2 as pb

MAX_WATCHERS = 10_000
"""Open watches of one balancer; half of its calls are left to workers."""

LOOK_S = 0.05
"""Interval at which changes are looked for: watchers get at most twenty messages per second."""

BATCH = 32
"""Watchers woken together."""

FAILED_S = 5.0
"""Interval at which a picture that could not be made is tried again."""

_SHARE_OF_LOOP = 0.2
"""Largest share of the event loop's time that goes to watchers."""


class Audience:
    """Those that watch one pool, and the picture that they share."""

    def __init__(self, view: PoolView, status: Callable[[PoolView], pb.PoolStatus]) -> None:
        self.view = view
        self.message = b""
        """WatchStatusResponse, encoded."""
        self.revision = -1
        """The pool's revision in `message`."""
        self.num_watchers = 0
        self._status = status
        self._behind: deque[asyncio.Future[None]] = deque()
        self._up_to_date: deque[asyncio.Future[None]] = deque()
        self._not_before_s = 0.0

    async def newer(self, revision: int) -> None:
        """Wait for this watcher's turn: the picture differs from `revision`, or none follows."""
        if self.view.closed:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._up_to_date if revision == self.revision else self._behind).append(turn)
        await turn

    def refresh(self) -> None:
        """Encode the picture again if the pool has changed, but take a share of the loop only."""
        now_s, began_s = time.monotonic(), time.thread_time()
        if self.view.pool.revision == self.revision or now_s < self._not_before_s:
            return
        self._not_before_s = now_s + FAILED_S  # Unless it succeeds.
        status = self._status(self.view)
        self.message = pb.WatchStatusResponse(status=status).SerializeToString()
        self.revision = status.revision
        self._behind.extend(self._up_to_date)
        self._up_to_date.clear()
        self._not_before_s = now_s + (time.thread_time() - began_s) / _SHARE_OF_LOOP

    def wake(self, most: int) -> int:
        """Wake up to `most` watchers whose picture is old, and return how many."""
        woken = 0
        while self._behind and woken < most:
            turn = self._behind.popleft()
            if not turn.done():  # Else the watcher has left.
                turn.set_result(None)
                woken += 1
        return woken

    def end(self) -> None:
        """Wake all, because the pool is closed."""
        for turn in (*self._behind, *self._up_to_date):
            if not turn.done():
                turn.set_result(None)
        self._behind.clear()
        self._up_to_date.clear()


class Watchers:
    """The audiences of all pools; `status` is what they see. For one event loop."""

    def __init__(self, status: Callable[[PoolView], pb.PoolStatus]) -> None:
        self._status = status
        self._failures = Failures("the watched status")
        self._audiences: dict[PoolView, Audience] = {}
        self._pacing: asyncio.Task[None] | None = None

    @property
    def are_full(self) -> bool:
        """Whether there is no room for another watcher."""
        return sum(one.num_watchers for one in self._audiences.values()) >= MAX_WATCHERS

    @contextmanager
    def joined(self, view: PoolView) -> Iterator[Audience]:
        """Watch a pool inside the block."""
        audience = self._audiences.setdefault(view, Audience(view, self._status))
        audience.num_watchers += 1
        if self._pacing is None or self._pacing.done():
            self._pacing = asyncio.create_task(self._pace(), name="watchers")
        try:
            yield audience
        finally:
            audience.num_watchers -= 1
            if not audience.num_watchers:
                del self._audiences[view]

    async def _pace(self) -> None:
        """Wake watchers, batch by batch, while there are any."""
        while self._audiences:
            began_s = time.thread_time()
            left = BATCH
            for audience in tuple(self._audiences.values()):
                left -= self._serve(audience, most=left)
            # The watchers run before this task does again.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            took_s = time.thread_time() - began_s
            await asyncio.sleep(LOOK_S if left else took_s * (1 / _SHARE_OF_LOOP - 1))

    def _serve(self, audience: Audience, *, most: int) -> int:
        if audience.view.closed:
            audience.end()
            return 0
        with self._failures.confined(audience.view.pool.name):
            audience.refresh()
            return audience.wake(most)
        return 0

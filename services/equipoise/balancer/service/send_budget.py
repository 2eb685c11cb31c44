"""`SendBudget`: the bytes on their way to the workers of one pool, and turns of large messages.

gRPC keeps a message, and a copy of it, until the receiver has read it or its connection has ended.
The end of the stream does not take it back. So whoever would add more than a pool may have waits.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from equipoise.balancer.by_pool import ByPool

MAX_BYTES = 32 * 2**20
"""Bytes on their way to a pool's workers from which on large messages wait; the last one begun may
exceed it. The message of an epoch of 1,024 ranks of Kimi K2 has 0.4 MiB, so 80 ranks are sent
theirs at a time."""


class SendBudget:
    """Lets one writer of a pool at a time begin a large message, in order."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes that gRPC has been given and that were not read yet."""
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        # The event loop keeps no task alive.
        self._writes: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether a new one could take its place."""
        return not self._writes and not self._turn.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a large message may be written; the block begins the write."""
        async with self._turn:
            while self.num_bytes >= MAX_BYTES:
                self._room.clear()
                await self._room.wait()
            yield

    def begin(self, write: Coroutine[Any, Any, None], *, num_bytes: int) -> asyncio.Task[None]:
        """Begin a write. It counts until gRPC ends it, so nobody may cancel it."""
        task = asyncio.create_task(write)
        self._writes.add(task)
        self.num_bytes += num_bytes

        def end(ended: asyncio.Task[None]) -> None:
            self._writes.discard(ended)
            self.num_bytes -= num_bytes
            self._room.set()
            if not ended.cancelled():
                ended.exception()  # Its stream may be over, and nobody waits for it.

        task.add_done_callback(end)
        return task


class SendBudgets(ByPool[SendBudget]):
    """The budget of each pool."""

    def __init__(self) -> None:
        super().__init__(SendBudget)

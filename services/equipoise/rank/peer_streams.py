"""`PeerStreams`: shares the streams that a rank sends at a time among its peers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc

from equipoise.trust.identity import Caller

_Context = grpc.aio.ServicerContext[Any, Any]


class PeerStreams:
    """At most `most` at a time, and half of them for one peer, however many connections it has."""

    def __init__(self, most: int, *, caller: Callable[[_Context], Caller]) -> None:
        """`caller` authenticates a call, where the port requires credentials."""
        self._caller = caller
        self._half = most // 2
        self._all = asyncio.Semaphore(most)
        # Kept while a call of the peer refers to it.
        self._of_peer: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, context: _Context) -> AsyncIterator[None]:
        """Wait for the turn of a call; the block is its stream."""
        sender = self._caller(context).sender
        of_peer = self._of_peer.setdefault(sender, asyncio.Semaphore(self._half))
        async with of_peer, self._all:
            yield

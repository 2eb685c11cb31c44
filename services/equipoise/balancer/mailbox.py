"""`Mailbox`: messages queued for one worker. Bounded, because a worker may stop reading."""

import asyncio
from collections.abc import AsyncIterator

from equipoise.wire.balancer_messages import BalancerMessage


class Mailbox:
    """At most one message of each kind is queued; a newer one replaces it.

    That loses nothing: the stream is level-triggered, so the newest JoinEpoch, Stage or Abort
    replaces what the older ones said. Kinds are sent in the order in which their newest message
    arrived. Used from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[type[BalancerMessage], BalancerMessage] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def post(self, message: BalancerMessage) -> None:
        """Queue a message; ignored once the mailbox is closed."""
        if self._closed:
            return
        # Removed first, so that it is queued after older messages.
        self._waiting.pop(type(message), None)
        self._waiting[type(message)] = message
        self._changed.set()

    def close(self) -> None:
        """Accept no more messages; queued ones are still delivered."""
        self._closed = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[BalancerMessage]:
        """Yield messages as they come, until the mailbox is closed and empty."""
        while True:
            while self._waiting:
                kind = next(iter(self._waiting))
                yield self._waiting.pop(kind)
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()

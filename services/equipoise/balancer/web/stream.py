"""`EventStreams`: server-sent events for a bounded number of clients, each wait bounded too."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from equipoise.balancer.web.state import PageState

MAX_CLIENTS = 64
"""Open streams of one balancer; further ones are told to come back later."""

INTERVAL_S = 1.0
"""Least time between two looks at the state."""

BEAT_S = 5.0
"""A stream with nothing to tell says so this often, so that a page knows it is not cut off."""

MAX_STREAM_S = 3600.0
"""Longest life of a stream; browsers come back by themselves."""

SEND_TIMEOUT_S = 15.0
"""A client that reads nothing for so long is let go."""

_RETRY_MS = 2000
_COME_BACK_S = "10"


class EventStreams:
    """Streams what changes in `state`, until `close`."""

    def __init__(
        self, state: PageState, *, max_clients: int = MAX_CLIENTS, interval_s: float = INTERVAL_S
    ) -> None:
        self._state = state
        self._max_clients = max_clients
        self._interval_s = interval_s
        self._closing = asyncio.Event()
        self._num_clients = 0

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a client inside the block."""
        self._num_clients += 1
        try:
            yield
        finally:
            self._num_clients -= 1

    async def answer(self, request: Request) -> Response:
        """`GET /events?pool=NAME`."""
        if self._num_clients >= self._max_clients or self._closing.is_set():
            words = f"{self._num_clients} pages look already: try again in {_COME_BACK_S} s\n"
            return PlainTextResponse(words, status_code=503, headers={"Retry-After": _COME_BACK_S})
        return _Stream(self, self._events(request.query_params.get("pool", "")))

    async def _events(self, name: str) -> AsyncIterator[str]:
        sent: dict[str, str] = {}
        began_s = spoke_s = time.monotonic()
        yield f"retry: {_RETRY_MS}\n\n"
        while not self._closing.is_set() and time.monotonic() - began_s < MAX_STREAM_S:
            events = await self._state.events(name)
            news = {event: data for event, data in events.items() if sent.get(event) != data}
            for event, data in news.items():
                yield f"event: {event}\ndata: {data}\n\n"
            sent = dict(events)
            if not news and time.monotonic() - spoke_s >= BEAT_S:
                yield "event: beat\ndata: {}\n\n"
                news = {"beat": ""}
            if news:
                spoke_s = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._closing.wait()


class _Stream(StreamingResponse):
    """Counts among the clients while it lasts."""

    def __init__(self, streams: EventStreams, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end, the client goes, or does not read."""

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with self._streams.counted():
            await super().__call__(scope, receive, bounded)

"""`EventStreams`: server-sent events for a limited number of clients, with timeouts."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from equipoise.balancer.web.state import PageState

MAX_CLIENTS = 64
"""Open streams of one balancer; further ones get 503 with Retry-After."""

INTERVAL_S = 1.0
"""Minimum time between two reads of the state."""

BEAT_S = 5.0
"""Interval of keep-alive events, by which a page knows that it is still connected."""

MAX_STREAM_S = 3600.0
"""Longest life of a stream; browsers reconnect by themselves."""

SEND_TIMEOUT_S = 15.0
"""A client that reads nothing for this long is disconnected."""

_RETRY_MS = 2000
_RETRY_AFTER_S = "10"


class EventStreams:
    """Streams the changes of `state` until `close`."""

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
            message = f"{self._num_clients} pages are open: try again in {_RETRY_AFTER_S} s\n"
            headers = {"Retry-After": _RETRY_AFTER_S}
            return PlainTextResponse(message, status_code=503, headers=headers)
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
    """A response that counts as a client until it ends."""

    def __init__(self, streams: EventStreams, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client disconnects or stops reading."""

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with self._streams.counted():
            await super().__call__(scope, receive, bounded)

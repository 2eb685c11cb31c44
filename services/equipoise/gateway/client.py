"""`HttpClient`: the client of one HTTP request; every wait for it is bounded."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from equipoise.gateway.errors import BodyTooLargeError, BodyTooSlowError, ClientGoneError


class HttpClient:
    """The request of a client that does not send or read within `timeout_s` ends.

    What was written before may still wait for the client; the server's socket bounds that.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, timeout_s: float) -> None:
        self.is_streaming = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s

    async def body(
        self,
        *,
        max_bytes: int,
        arriving: Callable[[asyncio.Timeout], AbstractContextManager[None]],
    ) -> bytes:
        """Receive the body. `arriving` counts it and may end its timeout early.

        Raises:
            BodyTooLargeError, BodyTooSlowError: it exceeds a limit.
            ClientGoneError: the client hung up.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                with arriving(timeout):
                    async for chunk in Request(self._scope, self._receive).stream():
                        body += chunk
                        if len(body) > max_bytes:
                            raise BodyTooLargeError(f"the body must have at most {max_bytes} bytes")
        except TimeoutError:
            raise BodyTooSlowError(
                f"the body did not arrive within {self._timeout_s:g} s, or sooner because too many "
                f"others arrive"
            ) from None
        except ClientDisconnect:
            raise ClientGoneError("the client hung up before its request was complete") from None
        return bytes(body)

    async def send_json(self, document: dict[str, Any]) -> None:
        """Send the whole response."""
        async with self._bounded():
            answer = Response(_json(document), media_type="application/json")
            await answer(self._scope, self._receive, self._send)

    async def send_event(
        self, data: dict[str, Any] | str, *, name: str = "", is_last: bool = False
    ) -> None:
        """Send a server-sent event; the first one starts the response, the last one ends it."""
        head = f"event: {name}\n" if name else ""
        text = data if isinstance(data, str) else _json(data)
        async with self._bounded():
            if not self.is_streaming:
                self.is_streaming = True
                await self._send(_STREAM_START)
            await self._send(
                {
                    "type": "http.response.body",
                    "body": f"{head}data: {text}\n\n".encode(),
                    "more_body": not is_last,
                }
            )

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise ClientGoneError(
                f"the client did not read for {self._timeout_s:g} s (client)"
            ) from None
        except OSError as error:
            raise ClientGoneError(f"the client hung up: {error}") from None


def _json(document: dict[str, Any]) -> str:
    """ASCII, because what repeats a client's strings may have unpaired surrogates."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # nginx buffers events otherwise.
        (b"x-accel-buffering", b"no"),
    ],
}

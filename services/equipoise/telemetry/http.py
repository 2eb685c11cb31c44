"""HTTP servers on the process's own event loop, where requests may read what the loop changes.

uvicorn limits the pause between two requests of a connection, but neither how long a client takes
to send a request's header nor the number of connections. `bounded_http` adds both limits. With TLS
they hold from the TCP connection on, so the handshake is part of them: asyncio's servers show a
protocol its connection only after the handshake.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from equipoise.settings.address import parse_address
from equipoise.telemetry.logs import Causes, printable

Tls = Callable[[], ssl.SSLContext]
"""Gives the context of a new connection, so that certificates can be replaced."""

_CLOSE_S = 1.0
"""Seconds that a client has to answer the end of a TLS connection."""

_log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """A uvicorn server whose owner stops it."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals to the process."""
        return nullcontext()


def open_listener(address: str) -> socket.socket:
    """Listen on host:port; port 0 takes a free port.

    Raises:
        ValueError: `address` is not host:port.
        OSError: the port is in use, or the host is not this machine.
    """
    listen = parse_address(address)
    family, _, _, _, bound = socket.getaddrinfo(
        listen.bare_host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.create_server(bound[:2], family=family)
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listener.detach())


def address_of(listener: socket.socket, *, listen: str) -> str:
    """host:port of a listener opened for `listen`, with the actual port."""
    return str(parse_address(listen)._replace(port=listener.getsockname()[1]))


def bounded_http(
    *,
    header_s: float,
    max_connections: int | None = None,
    ends_requests: bool = True,
    tls: Tls | None = None,
) -> "type[_BoundedHttp]":
    """A protocol for one server, with limits on its connections.

    A request's header may take `header_s` seconds from the start of the connection, with `tls`
    including the handshake, or from the end of the last request. A connection beyond
    `max_connections` takes the place of the oldest one without a request, or if all have one, of
    the oldest, so that neither idle clients nor those that take no response keep out others. If
    not `ends_requests`, it is closed itself if all others have one.
    """
    limits: dict[str, Any] = {
        "header_s": header_s,
        "max_connections": max_connections,
        "ends_requests": ends_requests,
        "opened": {},
    }
    if tls is None:
        return type("_Limited", (_BoundedHttp,), limits)
    return type(
        "_LimitedTls", (_BoundedHttps,), {**limits, "tls": staticmethod(tls), "failures": Causes()}
    )


class _BoundedHttp(H11Protocol):
    """Closes connections that wait too long for a request's header, and those that are too many."""

    header_s: float
    max_connections: int | None
    ends_requests: bool
    opened: dict["_BoundedHttp", None]
    """The connections of the server, oldest first."""
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._count()

    def _count(self) -> None:
        """Take a place among the connections, and start the timeout."""
        self.opened[self] = None
        if self.max_connections is not None and len(self.opened) > self.max_connections:
            idle = (one for one in self.opened if not one.has_request and one is not self)
            spare = next(idle, next(iter(self.opened)) if self.ends_requests else self)
            del self.opened[spare]
            spare.transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop the timeout if the header is complete; start it if a new request has begun."""
        super().data_received(data)
        if self.has_request:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self.opened.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def has_request(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.header_s, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _hang_up(self) -> None:
        self._waiting = None
        if not self.has_request:
            self.transport.close()


class _BoundedHttps(_BoundedHttp):
    """Makes the TLS handshake itself, so that a connection is counted before it."""

    tls: Tls
    failures: Causes
    """Failed handshakes of the server by cause."""
    _handshake: asyncio.Task[None] | None = None
    _early: bytes | None = b""
    """What arrived with the end of the handshake; None once HTTP has begun."""

    def connection_made(self, transport: Any) -> None:
        """Start the handshake and the timeout of handshake and first request."""
        self.transport = transport
        transport.pause_reading()
        self._handshake = self.loop.create_task(self._secure(transport))
        self._count()

    def data_received(self, data: bytes) -> None:
        """Keep the data until the handshake's task has handed the connection to HTTP."""
        if self._early is None:
            super().data_received(data)
        else:
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """End HTTP if it has begun, else the handshake."""
        if self._early is None:
            super().connection_lost(exc)
            return
        self.opened.pop(self, None)
        self._stop_waiting()

    async def _secure(self, transport: asyncio.Transport) -> None:
        secured = None
        try:
            secured = await self.loop.start_tls(
                *(transport, self, self.tls()),
                server_side=True,
                ssl_handshake_timeout=self.header_s,
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except OSError as error:
            cause = printable(str(error))
            if number := self.failures.count(cause):
                _log.warning("a client's TLS handshake failed: %s (%d so far)", cause, number)
        if secured is None:
            # asyncio reports the end of a connection to its protocol after the handshake only.
            transport.abort()
            self.connection_lost(None)
            return
        early, self._early = self._early, None
        H11Protocol.connection_made(self, secured)
        if early:
            self.data_received(early)

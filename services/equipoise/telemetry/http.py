"""HTTP servers on the process's own event loop, where requests may read what the loop changes.

uvicorn limits the pause between two requests of a connection, but neither how long a client takes
to send a request's header nor the number of connections. `bounded_http` adds both limits.
"""

import asyncio
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from equipoise.settings.address import parse_address


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


def bounded_http(*, header_s: float, max_connections: int | None = None) -> type[H11Protocol]:
    """A protocol for one server, with limits on its connections.

    A request's header may take `header_s` seconds from the start of the connection or the end of
    the last request. A connection beyond `max_connections` takes the place of the oldest one
    without a request, so that idle clients keep out no others.
    """

    class _Limited(_BoundedHttp):
        pass

    _Limited.header_s, _Limited.max_connections, _Limited.opened = header_s, max_connections, {}
    return _Limited


class _BoundedHttp(H11Protocol):
    """Closes connections that wait too long for a request's header, and those that are too many."""

    header_s: float
    max_connections: int | None
    opened: dict["_BoundedHttp", None]
    """The connections of the server, oldest first."""
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self.opened[self] = None
        if self.max_connections is not None and len(self.opened) > self.max_connections:
            spare = next((one for one in self.opened if not one.has_request), self)
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

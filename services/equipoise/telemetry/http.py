"""HTTP servers on the process's own event loop, where requests may read what the loop changes."""

import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn

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

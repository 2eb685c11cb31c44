"""Listeners of HTTP servers."""

import asyncio
import socket

import pytest

from equipoise.telemetry.http import open_listener


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_connections_send_small_messages_at_once(host):
    """Otherwise the first token over a kept connection waits for the client's delayed ACK."""
    accepted = asyncio.Queue()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.put_nowait(transport)

    try:
        listener = open_listener(f"{host}:0")
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = await asyncio.get_running_loop().create_server(Accepting, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        transport = await asyncio.wait_for(accepted.get(), 30)
        connection = transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        transport.close()

"""Workarounds for torch affect only their target."""

import socket
import threading

import pytest

from equipoise.worker.torch_workarounds import interruptible_store


@pytest.fixture
def host():
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_only_connections_opened_inside_the_block_are_shut_down(host):
    address = host.getsockname()[:2]
    with socket.create_connection(address) as earlier:
        abandoned = threading.Event()
        abandoned.set()
        name = f"{address[0]}:{address[1]}"
        with (
            interruptible_store(name, is_over=abandoned.is_set),
            socket.create_connection(address) as blocked,
        ):
            blocked.settimeout(120)
            assert blocked.recv(1) == b"", "the blocked read ends"
        earlier.settimeout(0.2)
        with pytest.raises(TimeoutError):
            earlier.recv(1)

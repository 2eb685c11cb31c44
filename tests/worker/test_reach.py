"""Which peers a rank reports as unreached."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from equipoise.worker.reach import TIMEOUT_S, unreached_peers
from tests.support.worker_parts import join_epoch_of

REFUSING = "127.0.0.1:1"


@contextmanager
def accepting():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def mute():
    """An address that neither accepts nor refuses: its queue of connections is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"
        for one in waiting:
            one.close()


def never():
    return threading.Event()


async def test_peers_that_refuse_or_do_not_answer_are_named_and_the_rank_itself_is_not():
    with accepting() as good, mute() as silent:
        join_epoch = join_epoch_of(
            good, REFUSING, silent, REFUSING, rank=3, rendezvous_address=good
        )
        began_s = time.monotonic()
        unreached = await unreached_peers(join_epoch, abandoned=never())
        assert unreached == ("worker-1", "worker-2")
        assert TIMEOUT_S <= time.monotonic() - began_s < TIMEOUT_S + 2.0


@pytest.mark.parametrize(("rank", "unreached"), [(0, ()), (1, ("worker-0",))])
async def test_a_host_is_reached_if_its_rendezvous_is_too(rank, unreached):
    with accepting() as good:
        join_epoch = join_epoch_of(good, good, rank=rank, rendezvous_address=REFUSING)
        assert await unreached_peers(join_epoch, abandoned=never()) == unreached


async def test_an_abandoned_epoch_is_left_at_once_and_names_no_peer():
    abandoned = threading.Event()
    asyncio.get_running_loop().call_later(0.2, abandoned.set)
    with mute() as silent:
        began_s = time.monotonic()
        assert await unreached_peers(join_epoch_of("", silent), abandoned=abandoned) == ()
        assert time.monotonic() - began_s < TIMEOUT_S - 0.5


async def test_a_name_without_an_address_is_unreached(monkeypatch):
    def unknown(*_arguments, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    join_epoch = join_epoch_of("", "w-1.example:7")
    assert await unreached_peers(join_epoch, abandoned=never()) == ("worker-1",)

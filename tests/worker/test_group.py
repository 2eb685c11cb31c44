"""Ranks meet, exchange headers, and say why when they cannot."""

import multiprocessing
import socket
import threading
from contextlib import contextmanager

import pytest

from equipoise.worker.errors import GroupError
from equipoise.worker.group import RankGroup, first_line
from equipoise.worker.header import StepHeader


def header(rank):
    return StepHeader(1, 5, rank, 3, 0, 0)


def listener():
    one = socket.create_server(("127.0.0.1", 0))
    return one, f"127.0.0.1:{one.getsockname()[1]}"


def form(address, **changes):
    how = {
        "num_ranks": 2,
        "meet_timeout_s": 60.0,
        "step_timeout_s": 20.0,
        "given_up": threading.Event(),
    }
    return RankGroup.form(rendezvous_address=address, **how | changes)


def peer(address, behaviour, said):
    """Rank 1 of two: takes one step, then dies, hangs, or closes in order."""
    own, _ = listener()
    group = form(address, rank=1, listener=own)
    group.exchange(header(1))
    if behaviour == "hang":
        said.wait(30)
    group.close()


@contextmanager
def rank_0_of_two(behaviour, *, step_timeout_s=20.0):
    context = multiprocessing.get_context("spawn")
    said = context.Event()
    own, address = listener()
    process = context.Process(target=peer, args=(address, behaviour, said), daemon=True)
    process.start()
    group = form(address, rank=0, listener=own, step_timeout_s=step_timeout_s)
    try:
        yield group
    finally:
        group.close()
        said.set()
        process.join(30)
        assert process.exitcode == 0


def test_a_rank_alone_hears_itself():
    own, address = listener()
    group = form(address, rank=0, num_ranks=1, listener=own)
    assert group.exchange(header(0)) == (header(0),)
    assert group.process_group is None
    group.close()


def test_headers_come_in_rank_order_and_a_lost_peer_is_a_clear_error():
    with rank_0_of_two("die") as group:
        assert group.exchange(header(0)) == (header(0), header(1))
        with pytest.raises(GroupError, match="peer rank failed or hangs"):
            group.exchange(header(0))


def test_a_hanging_peer_is_an_error_within_the_timeout():
    with rank_0_of_two("hang", step_timeout_s=2.0) as group:
        group.exchange(header(0))
        with pytest.raises(GroupError, match="peer rank failed or hangs"):
            group.exchange(header(0))


def test_ranks_that_never_meet_say_where_they_waited():
    own, address = listener()
    with pytest.raises(GroupError, match=f"2 ranks did not meet at {address} within 1 s"):
        form(address, rank=0, listener=own, meet_timeout_s=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_gives_up_does_not_wait_for_the_others(rank):
    own, address = listener()
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(GroupError, match="not here yet"):
        form(address, rank=rank, listener=own, meet_timeout_s=100_000, given_up=given_up)


def test_what_torch_says_is_cut_to_what_people_need():
    said = RuntimeError(
        "[/somewhere/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41. "
        "This is typically caused by a remote worker crashing.\nframe #0: native"
    )
    assert first_line(said) == "Connection closed by peer [127.0.0.1]:41"
    assert first_line(RuntimeError()) == "RuntimeError"

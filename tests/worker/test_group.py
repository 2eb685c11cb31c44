"""Ranks meet and exchange headers, or report why they cannot."""

import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from equipoise.planning.layout import contiguous_layout
from equipoise.rank.errors import GroupError
from equipoise.rank.header import Arrival, StepHeader
from equipoise.worker.errors import StepTimeoutError
from equipoise.worker.group import Rendezvous, backend, bound_nccl, first_line, meet
from tests.support.forking import forking
from tests.support.worker_parts import join_epoch_of


def header(rank):
    return StepHeader(1, 5, rank, 0, 3, 0, 0, 11, -12, 0)


@pytest.fixture
def rendezvous():
    """The address of a rendezvous."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    hosted = Rendezvous(listener)
    yield address
    hosted.close()


A_MINUTE = timedelta(seconds=60)
LAYOUT = contiguous_layout(num_layers=2, num_experts=8, num_ranks=2, slots_per_rank=6)


def form(address, **changes):
    """Meet at an address; keyword arguments change the JoinEpoch or how to meet."""
    how = {
        "timeout_s": 60.0,
        "step_timeout_s": 20.0,
        "abandoned": threading.Event(),
        "on_met": lambda: None,
        "device": torch.device("cpu"),
        "announcement": "",
        "check": lambda announcements: None,
    }
    how |= {name: changes.pop(name) for name in list(changes) if name in how}
    peers = [""] * changes.pop("num_ranks", 2)
    fields = {"rendezvous_address": address, "layout": LAYOUT}
    return meet(join_epoch_of(*peers, **fields | changes), **how)


def peer(address, behaviour, said, epoch):
    """Rank 1 of two: takes one step, then dies, hangs, or closes gracefully."""
    group = form(address, rank=1, epoch=epoch)
    group.exchange(header(1))
    if behaviour == "hang":
        said.wait(120)
    group.close()


def arrive_and_vanish(address, *, rank, epoch, num_ranks=2):
    """A rank that arrives at the rendezvous and is gone when the others form."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"epoch-{epoch}", store)
    store.set(f"ready/{rank}", "")
    store.set(f"there/{rank}", arrival(num_ranks=num_ranks).to_json())


def arrival(announcement="", *, num_ranks=2, **changes):
    """What a rank publishes."""
    join_epoch = join_epoch_of(*[""] * num_ranks, **{"layout": LAYOUT} | changes)
    return Arrival.of(join_epoch, announcement=announcement)


@contextmanager
def rank_0_of_two(address, behaviour, **changes):
    context = forking()
    said = context.Event()
    arguments = (address, behaviour, said, changes.get("epoch", 1))
    process = context.Process(target=peer, args=arguments, daemon=True)
    process.start()
    group = form(address, **changes)
    try:
        yield group
    finally:
        group.close()
        said.set()
        process.join(120)
        assert process.exitcode == 0


def test_a_single_rank_exchanges_headers_with_itself(rendezvous):
    group = form(rendezvous, num_ranks=1)
    assert group.exchange(header(0)) == (header(0),)
    assert group.process_group is None
    group.close()


def test_headers_come_in_rank_order_and_a_lost_peer_is_a_clear_error(rendezvous):
    with rank_0_of_two(rendezvous, "die") as group:
        assert group.exchange(header(0)) == (header(0), header(1))
        with pytest.raises(GroupError, match="peer rank failed or hangs") as failed:
            group.exchange(header(0))
        assert not isinstance(failed.value, StepTimeoutError)


def test_a_process_forms_one_group_after_another_at_the_same_address(rendezvous):
    for epoch in (1, 2, 3):
        met = []
        with rank_0_of_two(rendezvous, "close", epoch=epoch, on_met=lambda: met.append(1)) as group:  # noqa: B023
            assert group.exchange(header(0)) == (header(0), header(1))
            assert met == [1]


def test_a_rank_that_failed_to_form_forms_with_one_that_never_tried(rendezvous):
    arrive_and_vanish(rendezvous, rank=1, epoch=1)
    with pytest.raises(GroupError, match="ranks of epoch 1 met but could not form"):
        form(rendezvous, step_timeout_s=0.5)
    with rank_0_of_two(rendezvous, "die", epoch=2) as group:
        assert group.exchange(header(0)) == (header(0), header(1))


def begin_to_form(address, rank):
    """A rank of four: publishes where it can be reached, and waits for rank 0."""
    arrive_and_vanish(address, rank=rank, epoch=1, num_ranks=4)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    store = dist.PrefixStore("epoch-1", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)


def test_forming_with_peers_that_hang_meanwhile_is_bounded(rendezvous):
    """Gloo waits for those peers that connect to this rank, which their ports decide."""
    context = forking()
    hung = [context.Process(target=begin_to_form, args=(rendezvous, rank)) for rank in (1, 2, 3)]
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    try:
        for process in hung:
            process.start()
        store.wait(["epoch-1/0//cpu//0/1", "epoch-1/0//cpu//0/2", "epoch-1/0//cpu//0/3"], A_MINUTE)
        for process in hung:
            os.kill(process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(GroupError):
            form(rendezvous, step_timeout_s=5.0, num_ranks=4).exchange(header(0))
        assert time.monotonic() - began_s < 2 * 5.0 + 1.0
    finally:
        dist.destroy_process_group() if dist.is_initialized() else None
        for process in hung:
            process.kill()
            process.join(120)


def test_forming_with_a_peer_that_gave_up_before_is_bounded_and_can_be_abandoned(rendezvous):
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    arrive_and_vanish(rendezvous, rank=1, epoch=1)
    store.delete_key("epoch-1/ready/1")
    words = "could not form a process group: rank 1 (worker-1) was not ready within 0.5 s"
    with pytest.raises(GroupError, match=re.escape(words)):
        form(rendezvous, step_timeout_s=0.5)
    abandoned = threading.Event()
    threading.Timer(0.5, abandoned.set).start()
    with pytest.raises(GroupError, match="could not form a process group: abandoned"):
        form(rendezvous, step_timeout_s=1000.0, abandoned=abandoned)


def test_a_hanging_peer_is_an_error_within_the_timeout(rendezvous):
    with rank_0_of_two(rendezvous, "hang", step_timeout_s=4.0) as group:
        group.exchange(header(0))
        began_s = time.monotonic()
        with pytest.raises(StepTimeoutError, match="peer rank failed or hangs"):
            group.exchange(header(0))
        assert time.monotonic() - began_s > 3.0, "not the shorter timeout of forming"


def test_ranks_check_all_announcements_before_they_form(rendezvous):
    heard = []
    with rank_0_of_two(rendezvous, "close", announcement="torch", check=heard.append) as group:
        assert heard == [("torch", "")]
        group.exchange(header(0))


def test_ranks_that_do_not_agree_do_not_form(rendezvous):
    def reject(announcements):
        raise ValueError("ranks compute differently")

    host, _, port = rendezvous.rpartition(":")
    peer_store = dist.PrefixStore("epoch-1", dist.TCPStore(host, int(port), is_master=False))
    peer_store.set("there/1", arrival("triton").to_json())
    met = []
    words = "^the 2 ranks of epoch 1 met but do not agree: ranks compute differently$"
    with pytest.raises(GroupError, match=words):
        form(rendezvous, check=reject, on_met=lambda: met.append(1))
    assert not met


def test_a_rank_that_publishes_something_else_is_named(rendezvous):
    host, _, port = rendezvous.rpartition(":")
    peer_store = dist.PrefixStore("epoch-1", dist.TCPStore(host, int(port), is_master=False))
    peer_store.set("there/1", '[5, 1, "ab", "x", 13]')
    with pytest.raises(GroupError, match=r"do not agree: worker-1 published '.5, 1.*: restart it"):
        form(rendezvous)


def test_ranks_that_never_meet_report_where_they_waited(rendezvous):
    met = []
    with pytest.raises(
        GroupError, match=f"did not all reach the rendezvous at {rendezvous} within 1 s"
    ):
        form(rendezvous, timeout_s=1, on_met=lambda: met.append(1))
    assert not met


@pytest.mark.parametrize("way_out", ["bound", "abandoned", "bound, its name gone"])
def test_waiting_for_a_hung_host_is_bounded(way_out, monkeypatch):
    context = forking()
    addresses = context.Queue()
    process = context.Process(target=host, args=(addresses,), daemon=True)
    process.start()
    address = addresses.get(timeout=60)
    abandoned = threading.Event()
    try:
        form(address, num_ranks=2, epoch=1, abandoned=_already_set(), timeout_s=60)
    except GroupError:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        if way_out == "abandoned":
            abandoned.set()
        if "gone" in way_out:
            monkeypatch.setattr(socket, "getaddrinfo", _not_found)
        with pytest.raises(GroupError, match="did not all reach"):
            form(address, timeout_s=1000 if way_out == "abandoned" else 1, abandoned=abandoned)
    finally:
        process.kill()
        process.join(120)


def host(addresses):
    listener = socket.create_server(("127.0.0.1", 0))
    addresses.put(f"127.0.0.1:{listener.getsockname()[1]}")
    hosted = Rendezvous(listener)
    threading.Event().wait(60)
    hosted.close()


def _not_found(*_arguments, **_options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _already_set():
    event = threading.Event()
    event.set()
    return event


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_gives_up_does_not_wait_for_the_others(rendezvous, rank):
    with pytest.raises(GroupError, match="abandoned"):
        form(rendezvous, rank=rank, timeout_s=100_000, abandoned=_already_set())


def test_rows_on_a_gpu_travel_by_nccl_and_headers_always_by_gloo():
    assert backend(torch.device("cpu")) == "gloo"
    assert backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


def test_nccl_collectives_block_up_to_the_timeout_unless_configured_otherwise():
    for asked, got in ({}, "1"), ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, "0"):
        environment = dict(asked)
        bound_nccl(environment)
        assert environment == {"TORCH_NCCL_BLOCKING_WAIT": got}


def test_torch_errors_are_shortened_to_their_message():
    said = RuntimeError(
        "[/somewhere/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41. "
        "This is typically caused by a remote worker crashing.\nframe #0: native"
    )
    assert first_line(said) == "Connection closed by peer [127.0.0.1]:41"
    assert first_line(RuntimeError()) == "RuntimeError"

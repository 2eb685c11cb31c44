"""What happens to an engine's ranks, with real links to a real balancer, when something breaks."""

import os
import threading
import time

import numpy as np
import pytest

from equipoise.engines import link as link_module
from equipoise.rank.transfer import ExpertPuller
from equipoise.wire.balancer_messages import Stage
from equipoise_api.v1 import status_pb2
from tests.engines.linked import FIRST, NUM_EXPERTS, NUM_RANKS


def test_an_engine_is_balanced_and_shown(balancer, engine_of):
    engine = engine_of().start()
    engine.until(engine.has_switched)
    engine.until(lambda: balancer.status().rollouts_completed >= 1)
    assert engine.check()
    status = balancer.status()
    assert [rank.worker for rank in status.ranks] == [f"moe-{rank}" for rank in range(4)]
    assert {(rank.engine, rank.max_replicas) for rank in status.ranks} == {("test 1", 8)}
    engine.until(lambda: balancer.status().balancedness > 0.8)


def test_a_peer_that_cannot_be_reached_aborts_rollouts_and_the_engine_serves_on(
    balancer, engine_of, unused_tcp_port_factory
):
    engine, nowhere = engine_of(), unused_tcp_port_factory()

    def unreachable(_rank, link):
        serve = link._begin_epoch

        def begin():
            serve()
            link._port.credentials.bind = lambda server, listen: nowhere

        link._begin_epoch = begin

    engine.before_link = unreachable
    engine.start()
    engine.until(lambda: "unavailable from every source" in balancer.rejection())
    engine.until(lambda: balancer.status().rollouts_aborted >= 2)
    assert engine.check() == []
    assert not any(seat.stopped for seat in engine.seats)


def test_a_slow_peer_times_out_and_stops_no_pass(balancer, engine_of, monkeypatch):
    monkeypatch.setitem(ExpertPuller.__init__.__kwdefaults__, "source_timeout_s", 0.3)
    engine, hung = engine_of(), []

    def slow_down(rank, _link):
        held = engine.seats[rank].held
        read = held.read

        def slow(**about):
            hung.append(about)
            time.sleep(1.0)
            return read(**about)

        held.read = slow

    engine.before_link = slow_down
    engine.start()
    engine.until(lambda: len(engine.links) == NUM_RANKS)
    passes = engine.seats[0]._passes
    engine.until(lambda: "no answer in" in balancer.rejection())
    assert hung
    assert engine.seats[0]._passes > passes + 20
    assert engine.check() == []
    engine.until(
        lambda: any(one.name == "pull" and one.reached for one in balancer.status().timeouts)
    )


@pytest.fixture
def hung():
    """Holds up the thread that waits for it until the test ends, or sets it."""
    event = threading.Event()
    yield event
    event.set()


def test_a_rank_that_answers_nothing_aborts_a_rollout_and_is_named_until_it_answers(
    balancer, engine_of, hung
):
    engine, others = engine_of(), []

    def hang(rank, link):
        take = link.receive

        def receive(message):
            if isinstance(message, Stage) and not hung.is_set():
                others.append(message.layout.generation)
                hung.wait()
            take(message)

        if rank == 2:
            link.receive = receive

    engine.before_link = hang
    engine.start()
    engine.until(lambda: "rank 2" in balancer.rejection())
    engine.until(lambda: "moe-2" in balancer.status().health_reason)
    assert balancer.status().rollouts_aborted == 1
    engine.until_passes(200)
    assert engine.check() == []
    hung.set()
    engine.until(engine.has_switched)
    engine.until(lambda: balancer.status().health_reason == "")
    assert min(engine.check()) > others[0]
    assert not any(seat.stopped for seat in engine.seats)


def test_bytes_damaged_on_the_way_are_taken_from_another_rank_or_rejected(balancer, engine_of):
    """Ranks 0 and 1 send wrong bytes. Rank 3 has the experts of rank 0 too, nobody those of 1."""
    engine, sent = engine_of(), set()
    engine.share = np.full((2, NUM_EXPERTS), 1 / NUM_EXPERTS)

    def damage(rank, _link):
        held = engine.seats[rank].held
        read = held.read

        def damaged(*, layer, expert):
            sent.add(expert)
            payload = read(layer=layer, expert=expert).clone()
            payload[0] ^= 1
            return payload

        if rank < 2:
            held.read = damaged

    engine.before_link = damage
    engine.start()
    engine.until(lambda: balancer.status().health == status_pb2.POOL_HEALTH_SERVING)
    of_rank = FIRST.reshape(2, NUM_RANKS, -1)
    balancer.pin(of_rank[:, [0, 2, 1, 3]].reshape(2, -1))
    engine.until(lambda: "corrupted" in balancer.rejection())
    assert engine.check() == []
    assert sent <= {4, 5, 6, 7}
    balancer.pin(of_rank[:, [2, 1, 0, 3]].reshape(2, -1))
    engine.until(engine.has_switched)
    assert sent & {0, 1, 2, 3}, "none was asked for first"
    assert not any(seat.stopped for seat in engine.seats)


def test_damaged_memory_stops_balancing_by_name_and_the_engine_serves_on(
    balancer, engine_of, monkeypatch
):
    monkeypatch.setattr(link_module, "SCRUB_BYTES_PER_S", 1e6)
    engine = engine_of().start()
    engine.until(engine.has_switched)
    engine.ranks.tensors[1][0][0][2, 1] += 1
    engine.until(lambda: all(seat.stopped for seat in engine.seats))
    (reason,) = {seat.stopped for seat in engine.seats}
    assert "slot 6 (moe-1) of layer 0" in reason
    assert "memory of a machine is damaged" in reason
    engine.until(lambda: "memory of a machine is damaged" in balancer.status().health_reason)
    engine.until_passes(100)


def test_a_part_of_a_link_that_fails_stops_balancing_by_name_and_the_engine_serves_on(
    balancer, engine_of
):
    def fail(*_slot):
        raise RuntimeError("an illegal memory access was encountered")

    engine = engine_of().start()
    engine.until(lambda: all(seat.is_ready for seat in engine.seats))
    engine.seats[1].held.hash_slot = fail
    engine.until(lambda: all(seat.stopped for seat in engine.seats))
    assert "RuntimeError: an illegal memory access" in engine.seats[1].stopped
    assert engine.seats[0].stopped == "stopped by moe-1: the log there has the reason"
    engine.until_passes(10)


def test_a_rejection_is_logged_once_however_often_it_is_repeated(balancer, engine_of, caplog):
    """Of two engines in one pool whose ranks have the same names, the later gets no rank."""
    first = engine_of(pool="moe").start()
    first.until(first.has_switched)
    second = engine_of(pool="moe").start()
    second.until(lambda: len(second.links) == NUM_RANKS)
    link, times = second.links[0], []
    receive = link.receive
    link.receive = lambda message: (times.append(message), receive(message))
    second.until(lambda: len(times) >= 3)
    said = [
        one.message for one in caplog.records if "rejects this rank: worker moe-0" in one.message
    ]
    assert len(said) == 1
    assert not second.check()


def test_a_fork_of_an_engines_process_announces_no_shutdown_and_waits_for_none(balancer, engine_of):
    def announce(*_arguments):
        os._exit(1)

    engine = engine_of().start()
    engine.until(lambda: len(engine.links) == NUM_RANKS and engine.links[0]._port.address)
    child = os.fork()
    if not child:
        link_module.asyncio.run_coroutine_threadsafe = announce
        engine.links[0]._leave_at_exit()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lost_link_is_named_and_nothing_is_planned_until_it_returns(balancer, engine_of):
    engine = engine_of().start()
    engine.until(engine.has_switched)
    epoch = balancer.status().epoch
    link = engine.links[2]
    link._agent._addresses, link._agent._address = ("127.0.0.1:1",), "127.0.0.1:1"
    link._loop.call_soon_threadsafe(link._agent.reopen)
    engine.until(lambda: "moe-2" in balancer.status().health_reason)
    decided = balancer.status().last_decision.sequence
    engine.shift(5)
    engine.until_passes(500)
    assert balancer.status().epoch == epoch
    assert balancer.status().last_decision.sequence - decided <= 1
    switched = len(engine.steps)
    link._agent._addresses = (f"127.0.0.1:{balancer.port}",)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    engine.check()


@pytest.mark.parametrize("store", ["kept", "lost"])
def test_a_balancer_that_is_gone_is_survived_with_or_without_its_store(balancer, engine_of, store):
    engine = engine_of().start()
    engine.until(engine.has_switched)
    epoch = balancer.status().epoch
    balancer.stop()
    engine.until_passes(200)
    used = max(engine.check())
    if store == "lost":
        for path in balancer.store.parent.glob("state.sqlite*"):
            path.unlink()
    engine.shift(5)
    balancer.start()
    engine.until(lambda: max(engine.check()) > used)
    status = balancer.status()
    assert status.epoch == epoch
    assert not any(seat.stopped for seat in engine.seats)


def test_an_engine_that_restarts_is_taken_over_in_its_new_epoch(balancer, engine_of):
    first = engine_of().start()
    first.until(first.has_switched)
    before = balancer.status()
    first.stop()
    first.stop = lambda: None
    while time.time() <= max(first.check()) + 1:  # The second in which an engine starts numbers it.
        time.sleep(0.05)
    second = engine_of(seed=4).start()
    second.until(second.has_switched)
    second.until(lambda: balancer.status().health_reason == "")
    status = balancer.status()
    assert status.epoch > before.epoch
    assert min(second.check()) > max(first.check())
    assert [rank.state for rank in status.ranks] == ["connected"] * 4


def test_two_engines_at_one_balancer_are_balanced_apart(balancer, engine_of):
    engines = [engine_of(pool="a", seed=1).start(), engine_of(pool="b", seed=2).start()]
    for engine in engines:
        engine.until(engine.has_switched)
    for engine in engines:
        engine.check()
        status = balancer.status(engine.pool)
        assert {rank.worker for rank in status.ranks} == {f"{engine.pool}-{r}" for r in range(4)}
    one, other = (engine.seats[0].held.contents.layout.expert_of_slot for engine in engines)
    assert not np.array_equal(one, other)

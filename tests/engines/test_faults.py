"""What happens to an engine's ranks, with real links to a real balancer, when something breaks."""

import asyncio
import time

import numpy as np
import pytest

from equipoise.engines import baseline
from equipoise.engines import link as link_module
from equipoise.rank.scrubber import Scrubber
from equipoise.rank.transfer import ExpertPuller
from equipoise.wire.balancer_messages import Rejection, Stage
from tests.engines.linked import NUM_RANKS, BalancerThread, LinkedEngine


@pytest.fixture
def balancer(tmp_path, unused_tcp_port):
    one = BalancerThread(tmp_path, unused_tcp_port)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def engine_of(balancer):
    engines = []

    def make(**options):
        engines.append(LinkedEngine(balancer.port, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


def has_switched(engine, times=1):
    return lambda: len(engine.steps) >= times * NUM_RANKS


def shift(engine, seed):
    engine.share = np.random.default_rng(seed).dirichlet(np.full(12, 0.3), size=2)


def rejections(balancer, pool="moe"):
    decision = balancer.status(pool).last_decision
    return decision.reason if not decision.accepted else ""


def test_an_engine_is_balanced_and_shown(balancer, engine_of):
    engine = engine_of().start()
    engine.until(has_switched(engine))
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
            link._credentials.bind = lambda server, listen: nowhere

        link._begin_epoch = begin

    engine.before_link = unreachable
    engine.start()
    engine.until(lambda: "unavailable from every source" in rejections(balancer))
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
    engine.until(lambda: "no answer in" in rejections(balancer))
    assert hung
    assert engine.seats[0]._passes > passes + 20
    assert engine.check() == []
    engine.until(
        lambda: any(one.name == "pull" and one.reached for one in balancer.status().timeouts)
    )


def test_a_lost_link_is_named_and_nothing_is_planned_until_it_returns(balancer, engine_of):
    engine = engine_of().start()
    engine.until(has_switched(engine))
    epoch = balancer.status().epoch
    link = engine.links[2]
    link._agent._addresses, link._agent._address = ("127.0.0.1:1",), "127.0.0.1:1"
    link._loop.call_soon_threadsafe(link._agent.reopen)
    engine.until(lambda: "moe-2" in balancer.status().health_reason)
    decided = balancer.status().last_decision.sequence
    shift(engine, 5)
    passes = engine.seats[0]._passes
    engine.until(lambda: engine.seats[0]._passes > passes + 500)
    assert balancer.status().epoch == epoch
    assert balancer.status().last_decision.sequence - decided <= 1
    switched = len(engine.steps)
    link._agent._addresses = (f"127.0.0.1:{balancer.port}",)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    engine.check()


@pytest.mark.parametrize("store", ["kept", "lost"])
def test_a_balancer_that_is_gone_is_survived_with_or_without_its_store(balancer, engine_of, store):
    engine = engine_of().start()
    engine.until(has_switched(engine))
    epoch = balancer.status().epoch
    balancer.stop()
    passes = engine.seats[0]._passes
    engine.until(lambda: engine.seats[0]._passes > passes + 200)
    used = max(engine.check())
    if store == "lost":
        for path in balancer.store.parent.glob("state.sqlite*"):
            path.unlink()
    shift(engine, 5)
    balancer.start()
    engine.until(lambda: max(engine.check()) > used)
    status = balancer.status()
    assert status.epoch == epoch
    assert not any(seat.stopped for seat in engine.seats)


def test_an_engine_that_restarts_is_taken_over_in_its_new_epoch(balancer, engine_of):
    first = engine_of().start()
    first.until(has_switched(first))
    before = balancer.status()
    first.stop()
    first.stop = lambda: None
    while time.time() <= max(first.check()) + 1:  # The second in which an engine starts numbers it.
        time.sleep(0.05)
    second = engine_of(seed=4).start()
    second.until(has_switched(second))
    second.until(lambda: balancer.status().health_reason == "")
    status = balancer.status()
    assert status.epoch > before.epoch
    assert min(second.check()) > max(first.check())
    assert [rank.state for rank in status.ranks] == ["connected"] * 4


def test_two_engines_at_one_balancer_are_balanced_apart(balancer, engine_of):
    engines = [engine_of(pool="a", seed=1).start(), engine_of(pool="b", seed=2).start()]
    for engine in engines:
        engine.until(has_switched(engine))
    for engine in engines:
        engine.check()
        status = balancer.status(engine.pool)
        assert {rank.worker for rank in status.ranks} == {f"{engine.pool}-{r}" for r in range(4)}
    one, other = (engine.seats[0].held.contents.layout.expert_of_slot for engine in engines)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("is_announced", [True, False])
def test_updated_weights_begin_an_epoch_in_which_balancing_goes_on(
    balancer, engine_of, is_announced
):
    engine = engine_of().start()
    engine.until(has_switched(engine))
    epoch = engine.seats[0].epoch
    engine.update(is_announced=is_announced)
    engine.until(lambda: engine.seats[0].epoch > epoch)
    engine.until(lambda: balancer.status().epoch == engine.seats[0].epoch)
    switched = len(engine.steps)
    shift(engine, 5)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    engine.check()
    # A slot that was verified while the ranks compared the new bytes makes them compare once more.
    engine.until(
        lambda: (
            {rank.weights_version for rank in balancer.status().ranks}
            == {engine.seats[0].weights_version}
        )
    )
    assert not balancer.status().quarantined
    assert not any(seat.stopped for seat in engine.seats)


@pytest.mark.parametrize("is_announced", [True, False])
def test_weights_updated_before_a_switch_is_hashed_quarantine_no_rank(
    balancer, engine_of, is_announced
):
    engine, epochs = engine_of(), []

    def update_first(rank, _link):
        held = engine.seats[rank].held
        hash_changed = held.hash_changed

        def late(since):
            if not epochs:
                epochs.append(engine.seats[0].epoch)
                engine.update(is_announced=is_announced)
            return hash_changed(since)

        held.hash_changed = late

    engine.before_link = update_first
    engine.start()
    engine.until(lambda: epochs)
    engine.until(lambda: balancer.status().epoch == engine.seats[0].epoch > epochs[0])
    assert not balancer.status().quarantined
    switched = len(engine.steps)
    shift(engine, 5)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    assert not balancer.status().quarantined
    assert not any(seat.stopped for seat in engine.seats)


def test_no_rank_is_rejected_if_an_update_aborts_a_wave_whose_number_is_ahead_of_the_clock(
    balancer, engine_of, monkeypatch
):
    """As in a rollout of many waves a second."""
    began_s = time.time()
    monkeypatch.setattr(baseline.time, "time", lambda: began_s)
    staging, rejections, pull = [], [], ExpertPuller.pull

    def note(_rank, link):
        receive = link.receive

        def noted(message):
            if isinstance(message, Stage):
                staging.append(message.layout.generation)
            if isinstance(message, Rejection):
                rejections.append(message.reason)
            receive(message)

        link.receive = noted

    engine = engine_of()
    engine.before_link = note
    engine.start()
    engine.until(has_switched(engine))

    async def never(_puller, _moves):
        await asyncio.Event().wait()

    monkeypatch.setattr(ExpertPuller, "pull", never)
    shift(engine, 5)
    engine.until(lambda: max(staging) > engine.seats[0].generation)
    engine.update(is_announced=True)
    engine.until(lambda: engine.seats[0].epoch > max(staging))
    monkeypatch.setattr(ExpertPuller, "pull", pull)
    engine.until(lambda: balancer.status().epoch == engine.seats[0].epoch)
    switched = len(engine.steps)
    shift(engine, 6)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    assert engine.check()
    assert rejections == []


def test_every_slot_is_verified_although_the_weights_are_updated_more_often_than_in_a_pass(
    balancer, engine_of, monkeypatch
):
    """Every rank has eight slots; the weights are updated each time that one was verified."""
    verified = []

    async def note(scrubber, layer, slot):
        verified.append((scrubber, layer, slot))
        return await wrong(scrubber, layer, slot)

    wrong = Scrubber._wrong
    monkeypatch.setattr(Scrubber, "_wrong", note)
    monkeypatch.setattr(link_module, "SCRUB_BYTES_PER_S", 25.0)  # A slot every 0.4 s.
    engine = engine_of().start()
    engine.until(lambda: len(engine.links) == NUM_RANKS)
    for _ in range(10):
        before, epoch = len(verified), engine.seats[0].epoch
        engine.until(lambda before=before: len(verified) >= before + NUM_RANKS)
        engine.update(is_announced=True)
        engine.until(lambda epoch=epoch: engine.seats[0].epoch > epoch)
    assert not any(seat.stopped for seat in engine.seats)
    assert len({(layer, slot) for _, layer, slot in verified}) == 8
    assert len({scrubber for scrubber, _, _ in verified}) == NUM_RANKS


def test_an_idle_engine_is_shown_and_given_nothing(balancer, engine_of, monkeypatch):
    monkeypatch.setattr(link_module, "IDLE_AFTER_S", 0.3)
    engine = engine_of().start()
    engine.until(has_switched(engine))
    engine.idle(True)
    engine.until(lambda: all(rank.idle for rank in balancer.status().ranks))
    status = balancer.status()
    assert status.health_reason == ""
    engine.idle(False)
    switched = len(engine.steps)
    shift(engine, 5)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    assert not any(rank.idle for rank in balancer.status().ranks)
    engine.check()

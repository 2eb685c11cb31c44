"""An engine that takes no forward passes, on ranks with real links to a real balancer."""

import numpy as np

from equipoise.engines import link as link_module
from equipoise.wire.balancer_messages import Stage
from tests.engines.linked import NUM_EXPERTS, NUM_RANKS


def test_an_idle_engine_is_shown_and_given_nothing(balancer, engine_of, monkeypatch):
    monkeypatch.setattr(link_module, "IDLE_AFTER_S", 0.3)
    engine = engine_of().start()
    engine.until(engine.has_switched)
    engine.idle(True)
    engine.until(lambda: all(rank.idle for rank in balancer.status().ranks))
    status = balancer.status()
    assert status.health_reason == ""
    engine.idle(False)
    switched = len(engine.steps)
    engine.shift(5)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    assert not any(rank.idle for rank in balancer.status().ranks)
    engine.check()


def test_what_an_idle_engine_had_staged_is_dropped_and_never_switched_to(
    balancer, engine_of, monkeypatch
):
    """It falls idle when a layout arrives, and serves again after the time to switch is over."""
    engine, arrived = engine_of(), []

    def fall_idle(_rank, link):
        take = link.receive

        def receive(message):
            if isinstance(message, Stage) and not arrived:
                arrived.append(message.layout.generation)
                engine.park()
            take(message)

        link.receive = receive

    engine.before_link = fall_idle
    engine.start()
    engine.until(lambda: arrived)
    monkeypatch.setattr(link_module, "IDLE_AFTER_S", 0.3)
    engine.until(lambda: [seat.staged_generation for seat in engine.seats] == arrived * NUM_RANKS)
    engine.until(lambda: "takes no forward passes" in balancer.rejection())
    engine.until(lambda: not any(seat.staged_generation for seat in engine.seats))
    assert (balancer.status().rollouts_aborted, engine.steps) == (1, [])
    engine.idle(False)
    engine.until(engine.has_switched)
    assert min(engine.check()) > arrived[0]


def test_an_idle_engine_whose_ranks_had_agreed_switches_later_and_the_balancer_follows(
    balancer, engine_of, monkeypatch
):
    """Every rank had sent that it staged the layout; no abort can part them then."""
    engine, agreed = engine_of(), set()

    def fall_idle():
        if not agreed and all(seat._advertised for seat in engine.seats):
            agreed.update(seat._advertised.generation for seat in engine.seats)
            engine.idle(True)

    engine.after_pass = fall_idle
    engine.start()
    engine.until(lambda: agreed)
    monkeypatch.setattr(link_module, "IDLE_AFTER_S", 0.3)
    engine.until(lambda: "takes no forward passes" in balancer.rejection())
    engine.until(lambda: not any(seat.staged_generation for seat in engine.seats))
    assert engine.steps == []
    engine.share = np.full((2, NUM_EXPERTS), 1 / NUM_EXPERTS)  # Nothing else is worth a plan.
    engine.idle(False)
    engine.until(engine.has_switched)
    assert set(engine.check()[:1]) == agreed
    engine.until(lambda: balancer.status().generation >= max(agreed))
    assert not any(seat.stopped for seat in engine.seats)
    assert not balancer.status().quarantined

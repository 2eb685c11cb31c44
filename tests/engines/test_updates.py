"""Weights that an engine updates in place, on ranks with real links to a real balancer."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from equipoise.engines import baseline
from equipoise.engines import link as link_module
from equipoise.engines.port import PeerPort
from equipoise.rank.errors import DamagedSlotError
from equipoise.rank.scrubber import Scrubber
from equipoise.rank.transfer import ExpertPuller
from equipoise.wire.balancer_messages import Rejection, Stage
from tests.engines.linked import NUM_RANKS


@pytest.mark.parametrize("is_announced", [True, False])
def test_updated_weights_begin_an_epoch_in_which_balancing_goes_on(
    balancer, engine_of, is_announced
):
    engine = engine_of().start()
    engine.until(engine.has_switched)
    epoch = engine.seats[0].epoch
    engine.update(is_announced=is_announced)
    engine.until(lambda: engine.seats[0].epoch > epoch)
    engine.until(lambda: balancer.status().epoch == engine.seats[0].epoch)
    switched = len(engine.steps)
    engine.shift(5)
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


def test_a_slot_that_an_update_changed_is_no_damage(balancer, engine_of, caplog):
    async def find():
        raise DamagedSlotError("slot 0 holds other bytes; memory is damaged", checksums=None)

    engine = engine_of().start()
    engine.until(engine.has_switched)
    engine.park()
    for seat in engine.seats:
        seat.note_update()
    link, seat = engine.links[0], engine.seats[0]
    version = seat.weights_version
    assert version > seat.hashed_weights
    link._scrubber.run = find
    asyncio.run_coroutine_threadsafe(link._scrub(), link._loop).result()
    assert seat.weights_version == version
    assert "damaged" not in caplog.text


def test_an_epoch_that_begins_while_another_ends_leaves_one_scrubber(balancer, engine_of):
    may_end, ending = threading.Event(), []
    engine = engine_of().start()
    engine.until(lambda: len(engine.links) == NUM_RANKS and engine.links[0]._joined)
    link = engine.links[0]
    close = link._stager.close

    async def slow_close():
        ending.append(link)
        await asyncio.to_thread(may_end.wait)
        await close()

    def scrubbers():
        return sum(task.get_coro().__name__ == "_scrub" for task in list(link._tasks))

    link._stager.close = slow_close
    for _ in range(2):
        link._loop.call_soon_threadsafe(link._note_baseline, None)
    engine.until(lambda: ending)
    may_end.set()
    engine.until(lambda: link._joined and scrubbers() > 0)
    engine.until(lambda: not link._following.locked())
    assert scrubbers() == 1


def test_an_update_while_the_port_opens_is_followed(balancer, engine_of, monkeypatch):
    may_open, opened = threading.Event(), PeerPort.open

    async def slow_open(port, worker):
        await asyncio.to_thread(may_open.wait)
        await opened(port, worker)

    monkeypatch.setattr(PeerPort, "open", slow_open)
    engine = engine_of().start()
    engine.until(lambda: len(engine.links) == NUM_RANKS)
    epoch = engine.seats[0].epoch
    engine.update(is_announced=True)
    engine.until(lambda: engine.seats[0].epoch > epoch)
    may_open.set()
    engine.until(lambda: balancer.status().epoch == engine.seats[0].epoch)
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
    engine.until(lambda: not balancer.status().quarantined)  # The last rank hashes them too.
    switched = len(engine.steps)
    engine.shift(5)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    assert not balancer.status().quarantined
    assert not any(seat.stopped for seat in engine.seats)


def test_no_rank_is_rejected_if_an_update_aborts_a_wave_whose_number_is_ahead_of_the_clock(
    balancer, engine_of, monkeypatch
):
    """As in a rollout of many waves a second."""
    began_s = time.time()
    # Not of the module itself: deadlines of gRPC are counted by it.
    clock = SimpleNamespace(time=lambda: began_s, sleep=time.sleep)
    monkeypatch.setattr(baseline, "time", clock)
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
    engine.until(engine.has_switched)

    async def never(_puller, _moves):
        await asyncio.Event().wait()

    monkeypatch.setattr(ExpertPuller, "pull", never)
    engine.shift(5)
    engine.until(lambda: max(staging) > engine.seats[0].generation)
    engine.update(is_announced=True)
    engine.until(lambda: engine.seats[0].epoch > max(staging))
    monkeypatch.setattr(ExpertPuller, "pull", pull)
    engine.until(lambda: balancer.status().epoch == engine.seats[0].epoch)
    switched = len(engine.steps)
    engine.shift(6)
    engine.until(lambda: len(engine.steps) >= switched + NUM_RANKS)
    assert engine.check()
    # The first ranks with the new weights are quarantined until the last one has them, too.
    assert [reason for reason in rejections if "its checkpoint is" not in reason] == []


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

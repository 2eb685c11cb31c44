"""Bytes that change in a live slot are found, reported, and end the process by name."""

import asyncio
from dataclasses import replace

import grpc
import numpy as np
import pytest

from equipoise.rank.errors import DamagedSlotError, NotHeldError
from equipoise.rank.held import SlotHash
from equipoise.rank.scrubber import Scrubber
from equipoise.wire.messages import Leaving, Serving
from equipoise.worker.core import ModelCore
from equipoise.worker.lifecycle import Worker
from equipoise.worker.location import find_location
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc

LAYER, SLOT = 1, 4


def rot(core, *, layer=LAYER, slot=SLOT):
    """Flip one bit in a slot's memory."""
    payload = core.slots[layer].read(slot)
    payload[len(payload) // 3] ^= 4
    core.slots[layer].write(slot, payload)


def scrubber_of(core, held, *, pause_s=0.0):
    return Scrubber(
        held,
        checksums=core.payload_checksums,
        expert_bytes=core.shape.expert_bytes,
        bytes_per_s=1e12,
        min_pause_s=pause_s,
    )


async def run_in_epochs(scrubber, *, slots):
    """Run it again and again, and interrupt it after a few slots each time."""
    while True:
        verified = scrubber.num_verified
        epoch = asyncio.create_task(scrubber.run())
        while scrubber.num_verified < verified + slots and not epoch.done():
            await asyncio.wait([epoch], timeout=0.0)
        epoch.cancel()
        await asyncio.wait([epoch])
        if not epoch.cancelled():
            await epoch


async def run_in_epochs_of(seconds, scrubber):
    """Run it again and again, and interrupt it after this time."""
    while True:
        epoch = asyncio.create_task(scrubber.run())
        await asyncio.wait([epoch], timeout=seconds)
        epoch.cancel()
        await asyncio.wait([epoch])
        if not epoch.cancelled():
            await epoch


async def test_good_slots_are_verified_over_and_over(rank_of_one):
    core, held = rank_of_one()
    scrubber = scrubber_of(core, held)
    task = asyncio.create_task(scrubber.run())
    async with asyncio.timeout(60):
        while scrubber.num_verified <= 2 * held.expert_of_slot.size:
            await asyncio.wait([task], timeout=0.01)
            assert not task.done(), task.exception()
    task.cancel()


async def test_every_slot_has_its_turn_although_epochs_are_shorter_than_a_pass(rank_of_one):
    core, held = rank_of_one()
    scrubber = scrubber_of(core, held)
    last = tuple(size - 1 for size in held.expert_of_slot.shape)
    rot(core, layer=last[0], slot=last[1])
    with pytest.raises(DamagedSlotError, match=f"slot {last[1]} of layer {last[0]}"):
        await asyncio.wait_for(run_in_epochs(scrubber, slots=3), 60)


async def test_a_slot_is_verified_when_it_is_due_although_epochs_are_shorter_than_a_pause(
    rank_of_one,
):
    core, held = rank_of_one()
    rot(core, layer=0, slot=0)
    scrubber = scrubber_of(core, held, pause_s=1.0)
    with pytest.raises(DamagedSlotError, match="slot 0 of layer 0"):
        await asyncio.wait_for(run_in_epochs_of(0.4, scrubber), 20)


async def test_a_slot_that_a_peer_suspects_is_verified_at_once(rank_of_one, caplog):
    """Its turn is hours away; the other slot that is suspected is as it should be."""
    core, held = rank_of_one()
    scrubber = scrubber_of(core, held, pause_s=0.01)
    scrubber._pause_s = 3600.0
    task = asyncio.create_task(scrubber.run())
    caplog.set_level("INFO")
    scrubber.suspect(0, int(held.expert_of_slot[0, 0]))
    scrubber.suspect(0, int(held.expert_of_slot[0, 0]))
    scrubber.suspect(10**6, 0)
    scrubber.suspect(0, 10**6)
    async with asyncio.timeout(60):
        while scrubber.num_verified < 1:
            await asyncio.wait([task], timeout=0.01)
    rot(core)
    scrubber.suspect(LAYER, int(held.expert_of_slot[LAYER, SLOT]))
    with pytest.raises(DamagedSlotError, match=f"slot {SLOT} of layer {LAYER}"):
        await asyncio.wait_for(task, 30)
    assert scrubber.num_verified == 1
    assert "slot 0 of layer 0, but the slot is intact" in caplog.text


async def test_a_suspect_that_cannot_be_read_is_verified_later(rank_of_one, caplog, monkeypatch):
    """As while its engine sleeps."""
    core, held = rank_of_one()
    scrubber = scrubber_of(core, held, pause_s=0.01)
    scrubber._pause_s, asked = 3600.0, []
    hash_slot = held.hash_slot

    def sleeping(layer, slot):
        asked.append((layer, slot))
        if len(asked) < 4:
            raise NotHeldError("the engine sleeps")
        return hash_slot(layer, slot)

    monkeypatch.setattr(held, "hash_slot", sleeping)
    caplog.set_level("INFO")
    scrubber.suspect(0, int(held.expert_of_slot[0, 0]))
    task = asyncio.create_task(scrubber.run())
    async with asyncio.timeout(60):
        while len(asked) < 4:
            assert "intact" not in caplog.text
            await asyncio.wait([task], timeout=0.01)
        while "intact" not in caplog.text:
            await asyncio.wait([task], timeout=0.01)
    task.cancel()


async def test_peers_that_suspect_slots_without_end_keep_no_other_slot_from_its_turn(rank_of_one):
    core, held = rank_of_one()
    last = tuple(size - 1 for size in held.expert_of_slot.shape)
    rot(core, layer=last[0], slot=last[1])
    scrubber = scrubber_of(core, held, pause_s=0.001)
    task = asyncio.create_task(scrubber.run())
    async with asyncio.timeout(60):
        while not task.done():
            for expert in held.expert_of_slot[0].tolist():
                scrubber.suspect(0, expert)
            await asyncio.wait([task], timeout=0.0005)
    with pytest.raises(DamagedSlotError, match=f"slot {last[1]} of layer {last[0]}"):
        await task


async def test_one_flipped_bit_in_memory_is_found_with_the_checksums_as_they_are(rank_of_one):
    core, held = rank_of_one()
    rot(core)
    expert = int(held.expert_of_slot[LAYER, SLOT])
    with pytest.raises(DamagedSlotError, match=f"slot {SLOT} of layer {LAYER}") as caught:
        await asyncio.wait_for(scrubber_of(core, held).run(), 30)
    assert f"the bytes of expert {expert}" in str(caught.value)
    differs = (caught.value.checksums != held.contents.checksums).any(axis=2)
    assert np.argwhere(differs).tolist() == [[LAYER, SLOT]]


async def test_a_slot_that_was_filled_with_wrong_bytes_is_found_although_it_never_changes(
    rank_of_one,
):
    core, held = rank_of_one()
    rot(core)
    held.replace(
        held.contents.changed(
            held.contents.layout, {(LAYER, SLOT): held.hash_slot(LAYER, SLOT).found}
        ),
        rank=0,
        fill=lambda: None,
    )
    with pytest.raises(DamagedSlotError, match=f"slot {SLOT} of layer {LAYER}"):
        await asyncio.wait_for(scrubber_of(core, held).run(), 30)


async def test_a_worker_whose_memory_rots_reports_it_and_stops(
    balancer, settings, join_epoch, random_layout
):
    chosen = settings(balancer=balancer.address, scrub_mib_per_s=1000.0)
    core = ModelCore.load(chosen)
    worker = Worker(chosen, core=core, location=await find_location(chosen))
    task = asyncio.create_task(worker.run(asyncio.Event()))
    link = await balancer.link()
    link.say(join_epoch([link.hello], random_layout(5)))
    serving = await link.until(Serving)
    rot(core)
    changed = await link.until(
        Serving, lambda one: not np.array_equal(one.checksums, serving.checksums)
    )
    differs = (changed.checksums != serving.checksums).any(axis=2)
    assert np.argwhere(differs).tolist() == [[LAYER, SLOT]]
    with pytest.raises(DamagedSlotError, match=f"slot {SLOT} of layer {LAYER}"):
        await asyncio.wait_for(task, 60)
    last = link.heard[-1]
    assert isinstance(last, Leaving)
    assert last.failed
    assert f"slot {SLOT} of layer {LAYER}" in last.reason


async def test_a_worker_that_sent_wrong_bytes_reports_its_slot_when_a_peer_says_so(
    balancer, settings, join_epoch, random_layout
):
    """In the background the slot would be verified after hours."""
    chosen = settings(balancer=balancer.address, scrub_mib_per_s=1e-6)
    core = ModelCore.load(chosen)
    worker = Worker(chosen, core=core, location=await find_location(chosen))
    task = asyncio.create_task(worker.run(asyncio.Event()))
    link = await balancer.link()
    layout = random_layout(5)
    link.say(join_epoch([link.hello], layout))
    serving = await link.until(Serving)
    rot(core)
    expert = int(layout.expert_of_slot[LAYER, SLOT])
    request = pb.FetchRequest(epoch=serving.epoch, layer=LAYER, expert=expert, mismatched=True)
    async with grpc.aio.insecure_channel(link.hello.address) as channel:
        assert [one async for one in pb_grpc.ExpertTransferStub(channel).Fetch(request)] == []
    changed = await link.until(
        Serving, lambda one: not np.array_equal(one.checksums, serving.checksums)
    )
    differs = (changed.checksums != serving.checksums).any(axis=2)
    assert np.argwhere(differs).tolist() == [[LAYER, SLOT]]
    with pytest.raises(DamagedSlotError, match=f"slot {SLOT} of layer {LAYER}"):
        await asyncio.wait_for(task, 60)


async def test_a_peer_that_says_so_while_the_ranks_join_is_heard_once_they_serve(
    balancer, settings, join_epoch, random_layout
):
    chosen = settings(balancer=balancer.address, scrub_mib_per_s=1e-6, slots_per_rank=8)
    core, layout = ModelCore.load(chosen), random_layout(5, slots_per_rank=8)
    worker = Worker(chosen, core=core, location=await find_location(chosen))
    task = asyncio.create_task(worker.run(asyncio.Event()))
    link = await balancer.link()
    link.say(join_epoch([link.hello], layout))
    await link.until(Serving)
    rot(core)
    absent = replace(link.hello, worker="absent")
    two = random_layout(6, num_ranks=2, slots_per_rank=8)
    link.say(join_epoch([link.hello, absent], two, epoch=2))
    expert = int(layout.expert_of_slot[LAYER, SLOT])
    request = pb.FetchRequest(epoch=2, layer=LAYER, expert=expert, mismatched=True)
    async with grpc.aio.insecure_channel(link.hello.address) as channel:
        assert [one async for one in pb_grpc.ExpertTransferStub(channel).Fetch(request)] == []
    link.say(join_epoch([link.hello], replace(layout, generation=7), epoch=3))
    with pytest.raises(DamagedSlotError, match=f"slot {SLOT} of layer {LAYER}"):
        await asyncio.wait_for(task, 60)


async def test_scrubbing_can_be_turned_off(balancer, settings, join_epoch, random_layout):
    chosen = settings(balancer=balancer.address, scrub_mib_per_s=0.0)
    stop = asyncio.Event()
    worker = Worker(chosen, core=ModelCore.load(chosen), location=await find_location(chosen))
    task = asyncio.create_task(worker.run(stop))
    link = await balancer.link()
    link.say(join_epoch([link.hello], random_layout(5)))
    await link.until(Serving)
    assert worker.rank.scrubber is None
    stop.set()
    await asyncio.wait_for(task, 60)


class EmptiedMeanwhile:
    """Slots of which one is empty; each switch empties the other just before it is hashed."""

    expert_of_slot = np.array([[3, -1]], dtype=np.int32)

    def __init__(self):
        self.num_hashed = 0

    def hash_slot(self, layer, slot):
        assert self.expert_of_slot[layer, slot] != -1
        self.num_hashed += 1
        return SlotHash(contents=None, expert=-1, found=bytes(16))


async def test_a_slot_that_a_switch_empties_before_it_is_hashed_is_not_damaged():
    held = EmptiedMeanwhile()
    scrubber = Scrubber(
        held,
        checksums=np.ones((1, 4, 16), dtype=np.uint8),
        expert_bytes=1,
        bytes_per_s=1e12,
        min_pause_s=0.0,
    )
    task = asyncio.create_task(scrubber.run())
    async with asyncio.timeout(60):
        while held.num_hashed < 5:
            await asyncio.wait([task], timeout=0.01)
            assert not task.done(), task.exception()
    task.cancel()
    assert scrubber.num_verified == 0

"""How slots are filled: at a worker's start, and when ranks re-form."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.planning.arrays import EMPTY
from equipoise.planning.layout import Layout
from equipoise.rank.errors import GroupError
from equipoise.telemetry.loading import Loading
from equipoise.worker.core import ModelCore
from equipoise.worker.joining import WorkerSlots
from equipoise_model.experts import checksum
from tests.support.small_models import SMALL as CONFIG
from tests.support.worker_parts import parts_of

HELLO = SimpleNamespace(
    address="127.0.0.1:1", node="n", worker="w", rendezvous_address="127.0.0.1:2"
)


def slots_of(core, settings, *, say=lambda *_: None):
    return WorkerSlots(parts_of(settings, core=core), loading=Loading(say=say))


@pytest.mark.parametrize("has_room", [True, False])
async def test_an_epoch_that_changes_every_slot_is_staged_on_the_host_if_the_device_has_no_room(
    settings, random_layout, join_epoch, monkeypatch, has_room
):
    chosen = settings()
    core = ModelCore.load(chosen)
    slots, first, second = slots_of(core, chosen), random_layout(1), random_layout(2)
    for layout in (first, second):
        apply = await slots.stage(join_epoch([HELLO], layout), abandoned=threading.Event())
        if layout is second:
            assert slots.held.contents.layout is first, "others have not met it yet"
        apply()
        for experts in () if has_room else core.slots:
            monkeypatch.setattr(experts, "stage", _no_room)
    assert slots.held.contents.layout is second
    for layer, row in enumerate(second.expert_of_slot.tolist()):
        for slot, expert in enumerate(row):
            payload = core.checkpoint.read_expert(layer, expert)
            assert torch.equal(core.slots[layer].read(slot), payload)
            assert slots.held.contents.checksums[layer, slot].tobytes() == checksum(payload)


def _no_room(_payloads):
    raise torch.OutOfMemoryError("CUDA out of memory")


async def test_experts_are_read_into_their_slots_one_by_one_with_progress(
    settings, random_layout, join_epoch, monkeypatch
):
    chosen = settings()
    core, events, said = ModelCore.load(chosen), [], []

    def noted(what, owner, name):
        do = getattr(owner, name)

        def call(*arguments):
            events.append(what)
            return do(*arguments)

        monkeypatch.setattr(owner, name, call)

    noted("read", core.checkpoint, "read_expert")
    for experts in core.slots:
        noted("write", experts, "write")
    slots = slots_of(core, chosen, say=lambda _, done, total: said.append((done, total)))
    layout = random_layout(1)
    apply = await slots.stage(join_epoch([HELLO], layout), abandoned=threading.Event())
    apply()
    num_experts = layout.expert_of_slot.size
    assert events == ["read", "write"] * num_experts
    total = num_experts * core.shape.expert_bytes
    assert said[-1] == (total, total)
    assert slots.held is not None


async def test_an_epoch_continues_to_load_where_the_one_before_was_given_up(
    settings, random_layout, join_epoch, monkeypatch, caplog
):
    caplog.set_level("INFO")
    chosen, said = settings(), []
    core = ModelCore.load(chosen)
    reads = _noted_reads(core, monkeypatch)
    slots = slots_of(core, chosen, say=lambda _, done, total: said.append((done, total)))
    layout, moved = random_layout(1), random_layout(1).expert_of_slot.copy()
    num_experts = layout.expert_of_slot.size
    with pytest.raises(GroupError, match="abandoned"):
        await _give_up(slots, join_epoch([HELLO], layout), after=5, monkeypatch=monkeypatch)
    moved[0, [0, 1]] = moved[0, [1, 0]]
    reads.clear()
    second = join_epoch([HELLO], replace(layout, expert_of_slot=moved), epoch=2)
    (await slots.stage(second, abandoned=threading.Event()))()
    kept = [(0, 2), (0, 3), (0, 4)]
    assert reads == [
        (index[0], moved[index]) for index in np.ndindex(moved.shape) if index not in kept
    ]
    assert f"continuing to load: 3 of {num_experts} experts are in their slots" in caplog.messages
    assert said[-1] == (num_experts * core.shape.expert_bytes,) * 2
    for layer, slot in np.ndindex(moved.shape):
        payload = core.checkpoint.read_expert(layer, int(moved[layer, slot]))
        assert slots.held.contents.checksums[layer, slot].tobytes() == checksum(payload)


def _noted_reads(core, monkeypatch):
    """The layer and the expert of every read."""
    reads, read_expert = [], core.checkpoint.read_expert

    def noted(layer, expert):
        reads.append((layer, expert))
        return read_expert(layer, expert)

    monkeypatch.setattr(core.checkpoint, "read_expert", noted)
    return reads


async def _give_up(slots, join_epoch, *, after, monkeypatch):
    """Stage an epoch that is abandoned once so many experts are in their slots."""
    abandoned, write, num_written = threading.Event(), slots._write, 0

    def counted(payloads, emptied=()):
        nonlocal num_written
        write(payloads, emptied)
        num_written += len(payloads)
        if num_written == after:
            abandoned.set()

    with monkeypatch.context() as patch:
        patch.setattr(slots, "_write", counted)
        await slots.stage(join_epoch, abandoned=abandoned)


async def test_filled_slots_are_hashed_once_before_the_ranks_meet_and_off_the_event_loop(
    settings, random_layout, join_epoch, monkeypatch
):
    """Once they have met, the others wait for a few seconds only."""
    chosen = settings()
    core, threads = ModelCore.load(chosen), []
    slots, layout = slots_of(core, chosen), random_layout(1)
    for experts in core.slots:
        monkeypatch.setattr(experts, "read", _on_thread(experts.read, threads))
    # The ranks of the first epoch never meet.
    await slots.stage(join_epoch([HELLO], layout), abandoned=threading.Event())
    assert slots.held is None, "nobody may ask for what it holds"
    apply = await slots.stage(join_epoch([HELLO], layout, epoch=2), abandoned=threading.Event())
    assert len(threads) == layout.expert_of_slot.size
    assert threading.current_thread() not in threads
    apply()
    assert slots.held.contents.layout is layout
    assert len(threads) == layout.expert_of_slot.size


def _on_thread(do, threads):
    """Note the thread of every call."""

    def call(*arguments):
        threads.append(threading.current_thread())
        return do(*arguments)

    return call


@pytest.mark.parametrize("is_filled", [True, False])
async def test_slots_of_an_epoch_that_was_given_up_take_no_places_of_the_next(
    settings, join_epoch, monkeypatch, is_filled
):
    """As many places as experts, which the first layout has in the first slots, the second last."""
    num_layers, num_experts = CONFIG.num_moe_layers, CONFIG.n_routed_experts
    num_slots = num_experts + 2
    chosen = settings(slots_per_rank=num_slots, places=num_layers * num_experts)
    core = ModelCore.load(chosen)
    slots = slots_of(core, chosen)
    for generation, begin in ((1, 0), (2, 2)):
        table = np.full((num_layers, num_slots), EMPTY)
        table[:, begin : begin + num_experts] = np.arange(num_experts)
        layout = Layout(
            generation=generation, num_experts=num_experts, num_ranks=1, expert_of_slot=table
        )
        # The ranks of the first epoch never meet.
        epoch = join_epoch([HELLO], layout, epoch=generation)
        if generation == 1 and not is_filled:
            with pytest.raises(GroupError, match="abandoned"):
                await _give_up(slots, epoch, after=num_experts, monkeypatch=monkeypatch)
        else:
            apply = await slots.stage(epoch, abandoned=threading.Event())
    apply()
    for layer, slot in np.argwhere(table != EMPTY).tolist():
        payload = core.checkpoint.read_expert(layer, int(table[layer, slot]))
        assert torch.equal(core.slots[layer].read(slot), payload)

"""A Stage becomes a staged generation, or is rejected with the remedy."""

import asyncio
import dataclasses
import os
import shutil
import threading

import numpy as np
import pytest
import pytest_asyncio
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.planning.shares import WHOLE
from equipoise.rank.errors import StageRejectedError
from equipoise.rank.stager import Stager, check_places, check_stage
from equipoise.wire.balancer_messages import Abort
from equipoise.wire.messages import LayoutRejected, Staged
from equipoise.worker.spans import RankSpans
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.experts import checksum
from tests.support.worker_parts import join_epoch_of, puller_of


class Engine:
    """Takes offers as the engine does, and switches when the test calls `switch`."""

    def __init__(self, held):
        self.held = held
        self.staged = None

    @property
    def generation(self):
        return self.held.contents.layout.generation

    @property
    def staged_generation(self):
        return self.staged.generation if self.staged else 0

    def offer(self, staged):
        if staged.base_generation != self.generation:
            return False
        self.staged = staged
        return True

    def drop(self, generation):
        if self.staged_generation == generation:
            self.staged = None

    def switch(self):
        self.held.switch(self.staged)
        self.staged = None


class SlowCheckpoint:
    """Returns nothing until the test allows it."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.asked = threading.Event()
        self.may_give = threading.Event()

    def read_expert(self, layer, expert):
        self.asked.set()
        assert self.may_give.wait(60)
        return self.checkpoint.read_expert(layer, expert)


class Rig:
    """The stager of a single rank, with its collaborators."""

    def __init__(self, core, held):
        self.core, self.held = core, held
        self.engine = Engine(held)
        self.slow = SlowCheckpoint(core.checkpoint)
        self.answers = asyncio.Queue()
        self.spans = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.puller = puller_of(core, held, join_epoch_of(), read_checkpoint=self.slow.read_expert)
        self.stager = Stager(
            engine=self.engine,
            held=held,
            puller=self.puller,
            epoch=1,
            send=self.answers.put_nowait,
            spans=RankSpans(provider.get_tracer("test"), pool="p", worker="w-0"),
        )

    @property
    def running(self):
        return self.held.contents.layout

    async def answer(self):
        return await asyncio.wait_for(self.answers.get(), 60)


@pytest_asyncio.fixture
async def rig(rank_of_one):
    one = Rig(*rank_of_one())
    one.slow.may_give.set()
    yield one
    one.slow.may_give.set()
    await one.stager.close()
    await one.puller.close()


async def test_a_staged_generation_has_its_bytes_checksums_and_tables(
    rig, random_layout, stage_to, checkpoint
):
    layout = random_layout(2)
    stage = stage_to(rig.running, layout)
    rig.stager.stage(stage)
    answer = await rig.answer()
    assert isinstance(answer, Staged)
    assert (answer.epoch, answer.rank, answer.generation) == (1, 0, 2)
    assert answer.checkpoint_bytes == len(stage.moves) * rig.core.shape.expert_bytes
    assert answer.peer_bytes == 0
    assert answer.duration_us > 0
    assert rig.running.generation == 1
    rig.engine.switch()
    contents = rig.held.contents
    assert contents.layout is layout
    for layer, slot in np.ndindex(layout.expert_of_slot.shape):
        expected = checkpoint.read_expert(layer, int(layout.expert_of_slot[layer, slot]))
        assert rig.core.slots[layer].read(slot).equal(expected)
        assert contents.checksums[layer, slot].tobytes() == checksum(expected)


TRACEPARENT = f"00-{1:032x}-{2:016x}-01"


async def test_a_stage_is_a_child_span_of_the_rollout_with_its_outcome(
    rig, random_layout, stage_to
):
    stage = dataclasses.replace(stage_to(rig.running, random_layout(2)), traceparent=TRACEPARENT)
    rig.stager.stage(stage)
    await rig.answer()
    rig.stager.stage(dataclasses.replace(stage, layout=random_layout(3), base_generation=2))
    assert isinstance(await rig.answer(), LayoutRejected)
    good, rejected = rig.spans.get_finished_spans()
    for span in (good, rejected):
        assert (span.context.trace_id, span.parent.span_id) == (1, 2)
    assert good.status.is_ok
    assert good.attributes["moves"] == len(stage.moves) > 0
    assert "plan from there" in rejected.status.description


async def test_a_stage_without_moves_is_staged_at_once(rig, stage_to):
    same = dataclasses.replace(rig.running, generation=2)
    rig.stager.stage(stage_to(rig.running, same))
    answer = await rig.answer()
    assert isinstance(answer, Staged)
    assert rig.engine.staged_generation == 2


async def test_a_generation_that_changes_only_shares_pulls_nothing(rig, stage_to):
    shares = rig.running.shares().copy()
    (expert, *_) = np.flatnonzero(rig.running.replica_counts()[0] > 1)
    replicas = np.flatnonzero(rig.running.expert_of_slot[0] == expert)
    shares[0, replicas] = 0
    shares[0, replicas[-1]] = WHOLE
    other = dataclasses.replace(rig.running, generation=2, share_of_slot=shares)
    rig.stager.stage(stage_to(rig.running, other))
    answer = await rig.answer()
    assert isinstance(answer, Staged)
    assert (answer.peer_bytes, answer.checkpoint_bytes) == (0, 0)
    assert rig.engine.staged.tables.share_ends is not None
    rig.engine.switch()
    assert rig.running.same_placement(other)


async def test_a_repeated_stage_is_answered_again_and_pulls_nothing(rig, random_layout, stage_to):
    stage = stage_to(rig.running, random_layout(2))
    rig.stager.stage(stage)
    first = await rig.answer()
    rig.slow.asked.clear()
    rig.stager.stage(stage)
    assert await rig.answer() is first
    assert not rig.slow.asked.is_set()


async def test_a_stage_repeated_while_preparing_is_answered_once(rig, random_layout, stage_to):
    rig.slow.may_give.clear()
    stage = stage_to(rig.running, random_layout(2))
    rig.stager.stage(stage)
    await asyncio.to_thread(rig.slow.asked.wait, 60)
    rig.stager.stage(stage)
    rig.slow.may_give.set()
    assert isinstance(await rig.answer(), Staged)
    await rig.stager.close()
    assert rig.answers.empty()


async def test_the_latest_stage_wins(rig, random_layout, stage_to):
    rig.slow.may_give.clear()
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    await asyncio.to_thread(rig.slow.asked.wait, 60)
    rig.stager.stage(stage_to(rig.running, random_layout(3)))
    rig.slow.may_give.set()
    assert (await rig.answer()).generation == 3
    assert rig.engine.staged_generation == 3
    rig.stager.stage(stage_to(rig.running, random_layout(4)))
    assert rig.engine.staged_generation == 0
    assert (await rig.answer()).generation == 4


async def test_an_abort_drops_a_staged_generation_and_one_being_prepared(
    rig, random_layout, stage_to
):
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    await rig.answer()
    rig.stager.abort(Abort(epoch=1, generation=9, reason="another one"))
    rig.stager.abort(Abort(epoch=9, generation=2, reason="another epoch"))
    assert rig.engine.staged_generation == 2
    rig.stager.abort(Abort(epoch=1, generation=2, reason="a rank rejected"))
    assert rig.engine.staged_generation == 0

    rig.slow.may_give.clear()
    rig.slow.asked.clear()
    rig.stager.stage(stage_to(rig.running, random_layout(3)))
    await asyncio.to_thread(rig.slow.asked.wait, 60)
    preparing = rig.stager._task
    rig.stager.abort(Abort(epoch=1, generation=3, reason="a rank rejected"))
    rig.slow.may_give.set()
    await asyncio.wait([preparing], timeout=60)
    assert preparing.cancelled()
    assert rig.engine.staged_generation == 0
    assert rig.answers.empty()


async def test_an_abort_after_the_switch_changes_nothing(rig, random_layout, stage_to):
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    await rig.answer()
    rig.engine.switch()
    rig.stager.abort(Abort(epoch=1, generation=2, reason="too late"))
    assert rig.running.generation == 2


async def test_staging_that_a_switch_overtakes_is_rejected(
    rig, random_layout, stage_to, staged_from_checkpoint
):
    rig.slow.may_give.clear()
    rig.stager.stage(stage_to(rig.running, random_layout(3)))
    await asyncio.to_thread(rig.slow.asked.wait, 60)
    rig.held.switch(staged_from_checkpoint(rig.core, rig.running, random_layout(2)))
    rig.slow.may_give.set()
    answer = await rig.answer()
    assert isinstance(answer, LayoutRejected)
    assert "switched from generation 1 to 2 in the meantime" in answer.reason
    assert rig.engine.staged_generation == 0


async def test_staging_that_an_update_of_the_weights_overtakes_says_so(
    rig, random_layout, stage_to, monkeypatch
):
    monkeypatch.setattr(rig.engine, "offer", lambda _staged: False)
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    answer = await rig.answer()
    assert isinstance(answer, LayoutRejected)
    assert answer.reason == "its weights were updated while it staged: plan again"


async def test_staging_that_takes_too_long_is_rejected(rig, random_layout, stage_to):
    rig.slow.may_give.clear()
    rig.stager.stage(stage_to(rig.running, random_layout(2), timeout_s=0.2))
    answer = await rig.answer()
    assert isinstance(answer, LayoutRejected)
    assert "longer than the allowed 0.2 s" in answer.reason


async def test_staging_that_runs_out_of_device_memory_is_rejected(
    rig, random_layout, stage_to, monkeypatch
):
    def no_room(*_arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(rig.held, "prepare", no_room)
        rig.stager.stage(stage_to(rig.running, random_layout(2)))
        answer = await rig.answer()
    assert isinstance(answer, LayoutRejected)
    assert "not enough device memory to stage" in answer.reason
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    assert isinstance(await rig.answer(), Staged)


async def test_staging_that_fails_in_an_unforeseen_way_is_rejected_at_once(
    rig, random_layout, stage_to, monkeypatch
):
    def fail(*_arguments):
        raise RuntimeError("view size is not compatible")

    monkeypatch.setattr(rig.stager, "_build", fail)
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    rejected = await rig.answer()
    assert isinstance(rejected, LayoutRejected)
    assert "RuntimeError: view size is not compatible" in rejected.reason


async def test_a_stage_from_a_file_that_is_truncated_is_rejected_and_the_rank_runs_on(
    rig, random_layout, stage_to, checkpoint_path, tmp_path
):
    shutil.copytree(checkpoint_path, tmp_path, dirs_exist_ok=True)
    rig.slow.checkpoint = Checkpoint.open(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, 1000)
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    answer = await rig.answer()
    assert isinstance(answer, LayoutRejected)
    assert str(file) in answer.reason
    assert "copy the file again" in answer.reason
    assert rig.running.generation == 1
    rig.slow.checkpoint = rig.core.checkpoint
    rig.stager.stage(stage_to(rig.running, random_layout(3)))
    assert isinstance(await rig.answer(), Staged)


async def test_a_checksum_that_is_not_the_checkpoints_is_rejected(rig, random_layout, stage_to):
    stage = stage_to(rig.running, random_layout(2))
    wrong = dataclasses.replace(stage.moves[0], checksum=bytes(CHECKSUM_BYTES))
    rig.stager.stage(dataclasses.replace(stage, moves=(wrong, *stage.moves[1:])))
    answer = await rig.answer()
    assert isinstance(answer, LayoutRejected)
    assert answer.generation == 2
    assert "but the balancer expects 00000000" in answer.reason
    assert rig.engine.staged_generation == 0


async def test_after_a_rejection_the_same_generation_may_be_staged(rig, random_layout, stage_to):
    stage = stage_to(rig.running, random_layout(2))
    rig.stager.stage(dataclasses.replace(stage, epoch=7))
    assert isinstance(await rig.answer(), LayoutRejected)
    rig.stager.stage(stage)
    assert isinstance(await rig.answer(), Staged)


def foreign_slot(stage):
    return {"moves": (*stage.moves, dataclasses.replace(stage.moves[0], slot=12))}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda stage: {"epoch": 2}, "serves in epoch 1, not 2"),
        (lambda stage: {"base_generation": 3}, "runs generation 1, not 3"),
        (lambda stage: {"moves": stage.moves[1:]}, "has no move"),
        (foreign_slot, "slot 12 is not this rank's"),
        (
            lambda stage: {"layout": dataclasses.replace(stage.layout, generation=1)},
            "generation 1 is not newer than the running 1",
        ),
    ],
)
def test_a_stage_that_does_not_fit_is_rejected_with_the_fault(
    random_layout, stage_to, change, reason
):
    running = random_layout(1)
    stage = stage_to(running, random_layout(2))
    check_stage(stage, running=running, epoch=1, rank=0)
    with pytest.raises(StageRejectedError, match=reason):
        check_stage(dataclasses.replace(stage, **change(stage)), running=running, epoch=1, rank=0)


def test_a_layout_of_another_shape_is_rejected(random_layout, stage_to):
    running = random_layout(1)
    stage = dataclasses.replace(
        stage_to(running, random_layout(2)), layout=random_layout(2, slots_per_rank=10)
    )
    with pytest.raises(StageRejectedError, match=r"\(2, 10, 8, 1\) does not fit"):
        check_stage(stage, running=running, epoch=1, rank=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_checks_its_own_moves(random_layout, stage_to, rank):
    running = random_layout(1, num_ranks=2, slots_per_rank=6)
    layout = random_layout(2, num_ranks=2, slots_per_rank=6)
    own = stage_to(running, layout, rank=rank)
    check_stage(own, running=running, epoch=1, rank=rank)
    other = stage_to(running, layout, rank=1 - rank)
    with pytest.raises(StageRejectedError):
        check_stage(other, running=running, epoch=1, rank=rank)


def test_a_rank_rejects_more_experts_than_it_has_places_for_whatever_others_have(random_layout):
    layout = random_layout(2)
    used = layout.used_places[0]
    check_places(layout, rank=0, num_places=used)
    check_places(layout, rank=0, num_places=0)
    with pytest.raises(StageRejectedError, match=f"{used} experts, but has {used - 1} places"):
        check_places(layout, rank=0, num_places=used - 1)


async def test_another_layout_with_the_same_number_replaces_the_staged_one(
    rig, random_layout, stage_to
):
    first, second = random_layout(2), random_layout(2, seed=99)
    assert not first.same_placement(second)
    rig.stager.stage(stage_to(rig.running, first))
    await rig.answer()
    rig.stager.stage(stage_to(rig.running, second))
    assert rig.engine.staged_generation == 0, (
        "what a forgetful balancer staged before is not switched to"
    )
    await rig.answer()
    rig.engine.switch()
    assert rig.running.same_placement(second)


async def test_a_generation_unfinished_at_a_new_stream_is_never_staged(
    rig, random_layout, stage_to
):
    rig.slow.may_give.clear()
    rig.stager.stage(stage_to(rig.running, random_layout(2)))
    assert await asyncio.to_thread(rig.slow.asked.wait, 60)
    rig.stager.drop_unfinished()
    rig.slow.may_give.set()
    rig.stager.stage(stage_to(rig.running, random_layout(3)))
    assert (await rig.answer()).generation == 3
    rig.stager.drop_unfinished()
    assert rig.engine.staged_generation == 3, "what is staged is staged"

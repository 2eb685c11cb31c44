"""One flipped bit in one worker's copy of the checkpoint is found by that worker, and by name."""

import dataclasses
import itertools
import os
import shutil
import threading

import pytest

from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.rank.errors import TransferError, WorkerError
from equipoise.rank.transfer import ExpertTransferService
from equipoise.telemetry.loading import Loading
from equipoise.worker.core import ModelCore
from equipoise.worker.joining import WorkerSlots
from equipoise_model.checkpoint_manifest import MANIFEST, Manifest
from equipoise_model.experts import checksum
from tests.support.damaged_files import flip_bit
from tests.support.expert_servers import served
from tests.support.small_models import SMALL
from tests.support.worker_parts import join_epoch_of, parts_of

LAYER, EXPERT = 1, 5
NAME = f"model.layers.{SMALL.first_k_dense_replace + LAYER}.mlp.experts.{EXPERT}.up_proj.weight"


@pytest.fixture
def damaged(checkpoint_path, tmp_path):
    """A copy of the checkpoint, with one bit of expert 5 of MoE layer 1 flipped."""
    shutil.copytree(checkpoint_path, tmp_path, dirs_exist_ok=True)
    flip_bit(tmp_path, NAME)
    return tmp_path


@pytest.fixture
def slots_of(settings):
    def build(path):
        chosen = settings(checkpoint=path)
        parts = parts_of(chosen, core=ModelCore.load(chosen))
        return WorkerSlots(parts, loading=Loading(say=lambda *_: None))

    return build


async def test_a_rank_without_another_source_rejects_the_epoch_and_names_file_layer_and_expert(
    damaged, slots_of, random_layout
):
    join_epoch = join_epoch_of("", layout=random_layout(1))
    with pytest.raises(TransferError, match=rf"expert {EXPERT} of MoE layer {LAYER}") as caught:
        await slots_of(damaged).stage(join_epoch, abandoned=threading.Event())
    assert str(damaged / "model.safetensors") in str(caught.value)


async def test_a_rank_whose_peer_has_good_bytes_takes_them_from_the_peer(
    damaged, slots_of, random_layout, rank_of_one, checkpoint
):
    _, held = rank_of_one()
    layout = random_layout(2)
    sources = (RankSource(rank=1), CheckpointSource())
    moves = tuple(
        Move(
            layer=layer,
            slot=slot,
            expert=expert,
            checksum=checksum(checkpoint.read_expert(layer, expert)),
            sources=sources,
        )
        for layer, row in enumerate(layout.expert_of_slot.tolist())
        for slot, expert in enumerate(row)
    )
    peer = ExpertTransferService()
    peer.open(held, epoch=1)
    async with served(peer) as address:
        slots = slots_of(damaged)
        join_epoch = join_epoch_of("", address, layout=layout, moves=moves)
        (await slots.stage(join_epoch, abandoned=threading.Event()))()
    for move in moves:
        assert slots.held.contents.checksums[move.layer, move.slot].tobytes() == move.checksum


def test_damage_to_the_dense_part_stops_the_worker_before_it_says_hello(damaged, settings):
    flip_bit(damaged, "model.norm.weight")
    with pytest.raises(WorkerError, match=r"model\.norm\.weight does not match the digest"):
        ModelCore.load(settings(checkpoint=damaged))


def test_a_file_that_is_truncated_during_the_start_is_named_with_a_remedy(damaged, settings):
    file = damaged / "model.safetensors"
    loading = Loading(
        say=lambda *_: os.truncate(file, 1000), clock=itertools.count(step=60).__next__
    )
    with pytest.raises(
        WorkerError, match=r"truncated to 1000 bytes.*copy the file again"
    ) as caught:
        ModelCore.load(settings(checkpoint=damaged), loading=loading)
    assert str(file) in str(caught.value)


async def test_a_rank_whose_file_is_truncated_rejects_the_epoch_with_a_remedy(
    damaged, slots_of, random_layout
):
    slots, file = slots_of(damaged), damaged / "model.safetensors"
    os.truncate(file, 1000)
    join_epoch = join_epoch_of("", layout=random_layout(1))
    with pytest.raises(
        TransferError, match=r"truncated to 1000 bytes.*copy the file again"
    ) as caught:
        await slots.stage(join_epoch, abandoned=threading.Event())
    assert str(file) in str(caught.value)


async def test_a_rank_whose_manifest_contradicts_itself_blames_it_before_it_serves(
    checkpoint_path, tmp_path, slots_of, random_layout
):
    shutil.copytree(checkpoint_path, tmp_path, dirs_exist_ok=True)
    manifest = Manifest.read(tmp_path / MANIFEST)
    ((name, table),) = manifest.payloads.items()
    table = table.copy()
    table[LAYER, EXPERT] ^= 1
    dataclasses.replace(manifest, payloads={name: table}).write(tmp_path / MANIFEST)
    join_epoch = join_epoch_of("", layout=random_layout(1))
    with pytest.raises(TransferError, match=r"contradicts itself.*--replace") as caught:
        await slots_of(tmp_path).stage(join_epoch, abandoned=threading.Event())
    assert str(tmp_path / MANIFEST) in str(caught.value)
    assert NAME in str(caught.value)

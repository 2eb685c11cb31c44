"""Every read is verified against the manifest; the manifest is there, or is made."""

import dataclasses
import hashlib
import json
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from equipoise_model.checkpoint import Checkpoint, CheckpointError, save
from equipoise_model.checkpoint_convert import convert
from equipoise_model.checkpoint_digests import compute, verified, verify_all
from equipoise_model.checkpoint_manifest import MANIFEST, Manifest
from equipoise_model.config import Fp8Config
from equipoise_model.experts import checksum
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import TINY
from tests.support.damaged_files import flip_bit

SMALL = dataclasses.replace(TINY, num_hidden_layers=3, n_routed_experts=16)
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"  # MoE layer 1
FORMATS = {"bf16": None, "fp8": Fp8Config(), "fp8-ue8m0": Fp8Config(scale_fmt="ue8m0")}


@pytest.fixture(params=list(FORMATS))
def stored_as(request):
    return request.param


@pytest.fixture
def path(random_model, stored_as, tmp_path):
    """The folder of a checkpoint with MTP, in some shards."""
    folder = tmp_path / "checkpoint"
    save(random_model(SMALL, mtp=True), folder, fp8=FORMATS[stored_as], max_shard_bytes=400_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def opened(path, **options):
    """A checkpoint in the format in which it is stored."""
    return Checkpoint.open(path, keep_fp8=True, **options)


def read_everything(checkpoint):
    """Read as a worker does: the dense part, then each expert."""
    model = Transformer(checkpoint.config, mtp=checkpoint.has_mtp)
    checkpoint.load_dense(model)
    return [
        checkpoint.read_expert(*place)
        for place in np.ndindex(SMALL.num_expert_layers, SMALL.n_routed_experts)
    ]


def test_what_is_written_is_what_is_computed_from_the_files(path, stored_as):
    written = Manifest.read(path / MANIFEST)
    computed = compute(Checkpoint.open(path))
    assert written.tensors == computed.tensors
    assert written.payloads.keys() == computed.payloads.keys() == {stored_as}
    assert np.array_equal(written.payloads[stored_as], computed.payloads[stored_as])
    assert np.array_equal(written.draft_payloads[stored_as], computed.draft_payloads[stored_as])
    assert np.array_equal(written.shared_payloads[stored_as], computed.shared_payloads[stored_as])


def test_the_shared_expert_has_the_checksums_of_the_last_expert_if_it_is_placed(path, stored_as):
    formats = [{"keep_fp8": True}, {}]
    if stored_as == "bf16":
        formats.append({"quantize_as": Fp8Config()})
    for chosen in formats:
        dense = verified(Checkpoint.open(path, **chosen), mtp=True)
        checkpoint = verified(Checkpoint.open(path, shared_as_routed=True, **chosen), mtp=True)
        table = checkpoint.payload_checksums(mtp=True)
        assert table.shape[:2] == (SMALL.num_expert_layers, SMALL.n_routed_experts + 1)
        assert np.array_equal(table[:, :-1], dense.payload_checksums(mtp=True))
        assert np.array_equal(table[: SMALL.num_moe_layers], checkpoint.payload_checksums())
        for layer in range(SMALL.num_expert_layers):
            payload = checkpoint.read_expert(layer, SMALL.n_routed_experts)
            assert table[layer, -1].tobytes() == checksum(payload)
        again = Checkpoint.open(path, shared_as_routed=True, **chosen)
        assert np.array_equal(again.payload_checksums(mtp=True), table), "it was written"
        # Pools with and without it exchange latents.
        assert checkpoint.fingerprint == dense.fingerprint


def test_shared_experts_are_added_to_the_manifest_of_an_earlier_release(path, stored_as):
    written = Manifest.read(path / MANIFEST)
    dataclasses.replace(written, shared_payloads={}).write(path / MANIFEST)
    assert verified(opened(path)).payload_checksums() is not None
    assert "shared_payloads" not in json.loads((path / MANIFEST).read_text())
    assert opened(path, shared_as_routed=True).payload_checksums() is None
    read = []
    verified(opened(path, shared_as_routed=True), progress=lambda done, total: read.append(total))
    num_bytes = opened(path).config.expert_bytes
    assert set(read) == {SMALL.num_expert_layers * num_bytes}, "only the shared ones"
    now = Manifest.read(path / MANIFEST)
    assert np.array_equal(now.shared_payloads[stored_as], written.shared_payloads[stored_as])


def test_the_shared_experts_of_another_checkpoint_are_rejected(path, stored_as):
    written = Manifest.read(path / MANIFEST)
    shorter = {stored_as: written.shared_payloads[stored_as][:-2]}
    dataclasses.replace(written, shared_payloads=shorter).write(path / MANIFEST)
    with pytest.raises(CheckpointError, match="describes another checkpoint"):
        opened(path)


def test_damage_of_a_shared_expert_is_found_by_its_reader(path):
    name = "model.layers.2.mlp.shared_experts.up_proj.weight"
    file = flip_bit(path, name)
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: {name} does not match"):
        opened(path, shared_as_routed=True).read_expert(1, SMALL.n_routed_experts)


def test_a_model_with_several_shared_experts_has_none_to_place(random_model, tmp_path):
    several = dataclasses.replace(SMALL, n_shared_experts=2)
    save(random_model(several), tmp_path)
    assert not Manifest.read(tmp_path / MANIFEST).shared_payloads
    assert verified(opened(tmp_path)).payload_checksums() is not None


def test_the_manifest_of_an_earlier_release_lacks_the_modules_which_are_added_when_they_are_placed(
    path, stored_as
):
    written = Manifest.read(path / MANIFEST)
    fingerprint = opened(path).fingerprint
    dataclasses.replace(written, draft_payloads={}).write(path / MANIFEST)
    earlier = verified(opened(path))
    assert earlier.payload_checksums() is not None
    assert earlier.payload_checksums(mtp=True) is None
    assert "draft_payloads" not in json.loads((path / MANIFEST).read_text())
    read = []
    now = verified(opened(path), mtp=True, progress=lambda done, total: read.append(total))
    assert set(read) == {SMALL.n_routed_experts * now.config.expert_bytes}, "only the modules"
    assert np.array_equal(
        now.payload_checksums(mtp=True),
        np.concatenate([written.payloads[stored_as], written.draft_payloads[stored_as]]),
    )
    # Workers of both releases belong together, and an earlier one reads what this one writes.
    assert now.fingerprint == earlier.fingerprint == fingerprint
    document = json.loads((path / MANIFEST).read_text())
    assert [len(rows) for rows in document["payloads"].values()] == [SMALL.num_moe_layers]


def test_the_checksum_of_every_payload_is_known_in_every_format(path, stored_as):
    formats = [{"keep_fp8": True}, {}]
    if stored_as == "bf16":
        formats.append({"quantize_as": Fp8Config()})
    for chosen in formats:
        checkpoint = verified(Checkpoint.open(path, **chosen), mtp=True)
        table = checkpoint.payload_checksums(mtp=True)
        assert len(table) == SMALL.num_expert_layers > SMALL.num_moe_layers
        assert np.array_equal(checkpoint.payload_checksums(), table[: SMALL.num_moe_layers])
        for place in np.ndindex(table.shape[:2]):
            assert table[place].tobytes() == checksum(checkpoint.read_expert(*place))
        again = Checkpoint.open(path, **chosen)
        assert np.array_equal(again.payload_checksums(mtp=True), table), "it was written"


def test_a_good_checkpoint_is_read_whole(path):
    checkpoint = Checkpoint.open(path)
    assert checkpoint.manifest is not None
    read_everything(checkpoint)
    verify_all(checkpoint)


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_one_flipped_bit_of_an_expert_is_found_by_its_reader(path, keep_fp8):
    file = flip_bit(path, EXPERT)
    checkpoint = Checkpoint.open(path, keep_fp8=keep_fp8)
    with pytest.raises(CheckpointError, match="expert 5 of MoE layer 1") as caught:
        checkpoint.read_expert(1, 5)
    assert str(file) in str(caught.value)
    assert EXPERT in str(caught.value)
    checkpoint.read_expert(1, 4)
    with pytest.raises(CheckpointError, match=file.name):
        verify_all(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.3.eh_proj.weight",
    ],
)
def test_one_flipped_bit_of_the_dense_part_is_found_when_it_is_loaded(path, name):
    flip_bit(path, name)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load_dense(Transformer(checkpoint.config, mtp=True))


@pytest.fixture
def contradicting(path, stored_as):
    """Writes a manifest whose own digest is good, with a wrong digest of one expert's payload."""

    def write(table, place, chosen=stored_as):
        written = Manifest.read(path / MANIFEST)
        rows = getattr(written, table)[chosen].copy()
        rows[place] ^= 1
        dataclasses.replace(written, **{table: {chosen: rows}}).write(path / MANIFEST)

    return write


@pytest.mark.parametrize(
    ("table", "place", "read", "name"),
    [
        ("payloads", (1, 5), (1, 5), EXPERT),
        ("draft_payloads", (0, 3), (2, 3), "model.layers.3.mlp.experts.3.up_proj.weight"),
        ("shared_payloads", (1, 0), (1, 16), "model.layers.2.mlp.shared_experts.up_proj.weight"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_blamed_by_the_first_reader(
    path, contradicting, table, place, read, name
):
    contradicting(table, place)
    checkpoint = opened(path, shared_as_routed=True)
    checkpoint.read_expert(0, 5)
    for work in (lambda: checkpoint.read_expert(*read), lambda: verify_all(checkpoint)):
        with pytest.raises(CheckpointError, match=rf"{MANIFEST} contradicts itself") as caught:
            work()
        assert name in str(caught.value)
        assert "checkpoint manifest --checkpoint" in str(caught.value)
        assert "--replace" in str(caught.value)


def test_a_damaged_file_is_blamed_rather_than_the_manifest(path):
    file = flip_bit(path, EXPERT)
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: {EXPERT}"):
        opened(path).read_expert(1, 5)


def test_an_expert_is_hashed_once_if_the_checksum_of_its_payload_is_known(path, monkeypatch):
    checkpoint = opened(path)
    hashed = []
    monkeypatch.setattr(
        "equipoise_model.checkpoint.hashlib",
        SimpleNamespace(blake2b=lambda **_: pytest.fail("a tensor was hashed on its own")),
    )
    monkeypatch.setattr(
        "equipoise_model.checkpoint.checksum",
        lambda payload: hashed.append(payload.nbytes) or checksum(payload),
    )
    checkpoint.read_expert(1, 5)
    assert hashed == [checkpoint.config.expert_bytes]


def test_damage_is_not_converted_into_a_good_checkpoint(path, stored_as, tmp_path):
    flip_bit(path, EXPERT)
    fp8 = Fp8Config() if stored_as == "bf16" else None
    with pytest.raises(CheckpointError, match="expert 5 of MoE layer 1"):
        convert(Checkpoint.open(path), tmp_path / "converted", fp8=fp8)


def test_a_flipped_bit_of_a_scale_is_found(random_model, tmp_path):
    save(random_model(SMALL), tmp_path, fp8=Fp8Config())
    flip_bit(tmp_path, EXPERT + "_scale_inv")
    for keep_fp8 in (False, True):
        with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale_inv \(expert 5"):
            Checkpoint.open(tmp_path, keep_fp8=keep_fp8).read_expert(1, 5)


def test_a_missing_manifest_is_computed_and_written(path):
    before = opened(path).fingerprint
    (path / MANIFEST).unlink()
    assert Checkpoint.open(path).manifest is None
    progress_seen = []
    checkpoint = verified(opened(path), progress=lambda *both: progress_seen.append(both))
    assert checkpoint.fingerprint == before
    assert opened(path).fingerprint == before
    assert (path / MANIFEST).stat().st_mode == (path / "config.json").stat().st_mode
    done, total = progress_seen[-1]
    assert done == total > sum(f.stat().st_size for f in path.glob("*.safetensors")) * 0.9


def test_a_folder_that_cannot_be_written_needs_no_manifest(path, monkeypatch, caplog):
    before = opened(path).fingerprint
    (path / MANIFEST).unlink()

    def fail(*_arguments, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", fail)
    checkpoint = verified(opened(path))
    assert checkpoint.fingerprint == before
    flip_bit(path, EXPERT)
    with pytest.raises(CheckpointError, match="expert 5 of MoE layer 1"):
        checkpoint.read_expert(1, 5)
    assert "cannot be written (Read-only file system)" in caplog.text
    assert not [file for file in path.iterdir() if MANIFEST in file.name], "nothing is left"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"version": 1}',
        lambda text: text.replace('"bf16"', '"fp16"').replace('"fp8', '"fp7'),
        lambda text: text.replace("a", "b", 1),
    ],
    ids=["half", "empty", "list", "no digest", "other format", "one digit"],
)
def test_a_damaged_manifest_is_rejected(path, change):
    file = path / MANIFEST
    file.write_text(change(file.read_text()))
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged") as caught:
        Checkpoint.open(path)
    assert "checkpoint manifest --checkpoint" in str(caught.value)


def test_the_manifest_of_another_checkpoint_is_rejected(path, random_model, tmp_path):
    other = dataclasses.replace(SMALL, n_routed_experts=24)
    save(random_model(other), tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / MANIFEST, path / MANIFEST)
    with pytest.raises(CheckpointError, match="describes another checkpoint"):
        Checkpoint.open(path)


def test_other_weights_of_the_same_shape_are_rejected_as_they_are_read(
    path, stored_as, random_model, tmp_path
):
    save(random_model(SMALL, mtp=True, seed=9), tmp_path / "other", fp8=FORMATS[stored_as])
    shutil.copyfile(tmp_path / "other" / MANIFEST, path / MANIFEST)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError, match="does not match the digest"):
        checkpoint.read_expert(0, 0)


def test_a_later_version_is_rejected_with_a_remedy(path):
    document = json.loads((path / MANIFEST).read_text()) | {"version": 2}
    del document["digest"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    (path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="its version is 2, this release reads 1"):
        Checkpoint.open(path)


def test_workers_that_write_the_manifest_at_once_do_not_fight(path):
    before = opened(path).fingerprint
    (path / MANIFEST).unlink()
    start, found, faults = threading.Barrier(9), [], []

    def work():
        start.wait()
        found.append(verified(opened(path)).fingerprint)

    def look():
        start.wait()
        while len(found) < 8:
            try:
                Manifest.read(path / MANIFEST)
            except CheckpointError as error:
                faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)] + [threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {before}
    assert not faults, "a reader never sees a part of it"
    assert [f.name for f in path.iterdir() if MANIFEST in f.name] == [MANIFEST]


def test_shards_do_not_change_what_a_checkpoint_is(path, stored_as, tmp_path):
    before = opened(path).fingerprint
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    for name in ("config.json", MANIFEST):
        shutil.copyfile(path / name, tmp_path / "one" / name)
    checkpoint = opened(tmp_path / "one")
    assert checkpoint.fingerprint == before
    read_everything(Checkpoint.open(tmp_path / "one"))


def test_one_bit_anywhere_changes_the_fingerprint(path):
    before = opened(path).fingerprint
    flip_bit(path, EXPERT)
    (path / MANIFEST).unlink()
    assert verified(opened(path)).fingerprint != before


def test_a_bfloat16_reads_as_it_was_saved(random_model, tmp_path):
    model = random_model(SMALL)
    save(model, tmp_path)
    assert torch.equal(
        Checkpoint.open(tmp_path).read("lm_head.weight"), model.lm_head.weight.bfloat16()
    )

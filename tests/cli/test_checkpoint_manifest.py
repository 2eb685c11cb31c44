"""A manifest written once, and a checkpoint verified with it, as an operator asks for it."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.formats.packaged import packaged_checkpoint
from equipoise.settings.errors import InvalidSettingsError
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.checkpoint_manifest import MANIFEST
from equipoise_model.config import Fp8Config
from tests.support.damaged_files import flip_bit

EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of the packaged checkpoint, with its manifest."""
    for name in ("config.json", "model.safetensors", MANIFEST):
        shutil.copyfile(packaged_checkpoint() / name, tmp_path / name)
    return tmp_path


def manifest(*arguments):
    """What the command prints; its faults are raised as they are."""
    command = ["checkpoint", "manifest", "--checkpoint", *map(str, arguments), "--json"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_manifest_is_written_once_and_verified_from_then_on(folder):
    (folder / MANIFEST).unlink()
    first, second = manifest(folder), manifest(folder)
    assert (first["written"], first["verified"]) == (True, False)
    assert (second["written"], second["verified"]) == (False, True)
    assert first["fingerprint"] == second["fingerprint"] == Checkpoint.open(folder).fingerprint
    assert (folder / MANIFEST).read_bytes() == (packaged_checkpoint() / MANIFEST).read_bytes()


def test_damage_is_named(folder):
    flip_bit(folder, EXPERT)
    with pytest.raises(InvalidSettingsError, match="expert 7 of MoE layer 0"):
        manifest(folder)


def test_a_change_on_purpose_needs_to_be_said(folder):
    before = Checkpoint.open(folder).fingerprint
    flip_bit(folder, EXPERT)
    result = manifest(folder, "--replace")
    assert result["written"]
    assert result["fingerprint"] != before
    assert manifest(folder)["verified"]


def test_the_payloads_of_another_format_are_recorded_for_workers_that_convert(folder):
    assert manifest(folder, "--weights", "fp8")["formats"] == ["bf16", "fp8"]
    table = Checkpoint.open(folder, quantize_as=Fp8Config()).payload_checksums()
    assert table is not None
    assert not manifest(folder, "--weights", "fp8")["written"]


def test_a_folder_that_cannot_be_written_is_named(folder, monkeypatch):
    (folder / MANIFEST).unlink()

    def fail(*_arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InvalidSettingsError, match=r"cannot write .*: Read-only"):
        manifest(folder)

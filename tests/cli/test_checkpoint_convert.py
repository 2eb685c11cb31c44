"""Weights from BF16 to FP8 and back, as a person asks for it."""

import json

import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.formats.packaged import packaged_checkpoint
from equipoise.settings.errors import InvalidSettingsError
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.config import Fp8Config

TINY = packaged_checkpoint()


def convert(*arguments):
    """What the command prints; its faults are raised as they are."""
    command = ["checkpoint", "convert", *map(str, arguments)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "fp8"
    return path, convert("--checkpoint", TINY, "--out", path, "--ue8m0")


def test_fp8_weights_are_about_half_the_size_and_other_files_are_copied(in_fp8):
    path, said = in_fp8
    assert ": 3.9 MiB in FP8 (from 7.2 MiB), 1 file; copied " in said
    stored = Checkpoint.open(path, keep_fp8=True)
    assert stored.is_fp8
    assert stored.config.quantization_config == Fp8Config(scale_fmt="ue8m0")
    name = "tokenizer_config.json"
    assert (path / name).read_bytes() == (TINY / name).read_bytes()
    assert not list(path.glob("*.new"))


def test_back_in_bf16_readers_get_the_numbers_that_fp8_had_from_more_files(in_fp8, tmp_path):
    path, _ = in_fp8
    arguments = ("--checkpoint", path, "--out", tmp_path, "--weights", "bf16")
    result = json.loads(convert(*arguments, "--shard-gib", 0.002, "--json"))
    assert (result["weights"], result["files"]) == ("bf16", 4)
    assert result["bytes_after"] > 1.8 * result["bytes_before"]
    back, source = Checkpoint.open(tmp_path), Checkpoint.open(path)
    assert not back.is_fp8
    assert back.read_expert(0, 5).tolist() == source.read_expert(0, 5).tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", TINY, "--out", "x", "--shard-gib", "0"], "--shard-gib must be above 0"),
        (["--checkpoint", TINY, "--out", "x", "--weights", "bf16", "--ue8m0"], "--weights fp8"),
        (["--checkpoint", TINY, "--out", TINY / "config.json"], "cannot write .*: File exists"),
    ],
)
def test_invalid_options_are_rejected(arguments, words):
    with pytest.raises(InvalidSettingsError, match=words):
        convert(*arguments)


def test_unsuitable_checkpoints_are_rejected(in_fp8, tmp_path):
    path, _ = in_fp8
    with pytest.raises(InvalidSettingsError, match="is in FP8 already"):
        convert("--checkpoint", path, "--out", tmp_path / "again")
    with pytest.raises(InvalidSettingsError, match=r"config.json cannot be read"):
        convert("--checkpoint", tmp_path / "nowhere", "--out", tmp_path / "x")

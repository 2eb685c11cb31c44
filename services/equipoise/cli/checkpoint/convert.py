"""`equipoise checkpoint convert`: convert weights between BF16 and FP8, and reshard them."""

import shutil
from pathlib import Path

from rich.progress import DownloadColumn, TaskProgressColumn

from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings, WeightFormat
from equipoise.cli.display import console, format_count, print_json, progress_bar
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.numbers import format_bytes
from equipoise_model.checkpoint import Checkpoint, CheckpointError
from equipoise_model.checkpoint_convert import convert
from equipoise_model.checkpoint_manifest import MANIFEST
from equipoise_model.checkpoint_writer import CONFIG, INDEX
from equipoise_model.config import Fp8Config

_SHARDS = "*.safetensors"
_WRITTEN = {CONFIG, INDEX, MANIFEST}
_BESIDE_WEIGHTS = {".jinja", ".json", ".model", ".txt"}
"""Suffixes of tokenizers, chat templates and similar files."""


def run(settings: ConvertCheckpointSettings) -> int:
    """Read one folder, write the other, and print the sizes.

    Raises:
        InvalidSettingsError: the checkpoint cannot be converted, or the folder cannot be written.
        UnsupportedConfigError: the model is not supported.
    """
    source, out = settings.checkpoint, settings.out
    scales = "ue8m0" if settings.ue8m0 else None
    fp8 = Fp8Config(scale_fmt=scales) if settings.weights is WeightFormat.FP8 else None
    try:
        checkpoint = Checkpoint.open(source)
        with progress_bar(TaskProgressColumn(), DownloadColumn(binary_units=True)) as bar:
            task = bar.add_task(f"writing {out}", total=None)
            convert(
                checkpoint,
                out,
                fp8=fp8,
                max_shard_bytes=settings.max_shard_bytes,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        copied = _copy_beside_weights(source, out)
    except CheckpointError as error:
        raise InvalidSettingsError(str(error)) from error
    except OSError as error:
        raise InvalidSettingsError(
            f"cannot write {out}: {error.strerror}: choose another --out"
        ) from error
    before, after = _num_bytes(source), _num_bytes(out)
    num_files = len(list(out.glob(_SHARDS)))
    if settings.json:
        document = {
            "out": str(out),
            "weights": settings.weights,
            "files": num_files,
            "bytes_before": before,
            "bytes_after": after,
            "copied": copied,
        }
        print_json(document)
    else:
        beside = f"; copied {', '.join(copied)}" if copied else ""
        console().print(
            f"wrote {out}: {format_bytes(after)} in {settings.weights.upper()} "
            f"(from {format_bytes(before)}), {format_count(num_files, 'file')}{beside}"
        )
    return 0


def _copy_beside_weights(source: Path, out: Path) -> list[str]:
    """Copy the model's files other than weights; return their names."""
    names = sorted(
        file.name
        for file in source.iterdir()
        if file.is_file() and file.suffix in _BESIDE_WEIGHTS and file.name not in _WRITTEN
    )
    for name in names:
        shutil.copyfile(source / name, out / name)
    return names


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob(_SHARDS))

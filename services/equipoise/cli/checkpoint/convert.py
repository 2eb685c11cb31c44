"""`equipoise checkpoint convert`: convert weights between BF16 and FP8, and reshard them."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import DownloadColumn, TaskProgressColumn

from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings, Weights
from equipoise.cli.display import console, format_bytes, format_count, progress_bar
from equipoise.cli.offline.settings import ToolInputError
from equipoise_model.checkpoint import Checkpoint, CheckpointError
from equipoise_model.checkpoint_convert import convert
from equipoise_model.checkpoint_writer import CONFIG, INDEX
from equipoise_model.config import Fp8Config

_SHARDS = "*.safetensors"
_BESIDE_WEIGHTS = {".jinja", ".json", ".model", ".txt"}
"""Suffixes of tokenizers, chat templates and similar files."""


def run(settings: ConvertCheckpointSettings) -> int:
    """Read one folder, write the other, and print the sizes.

    Raises:
        ToolInputError: the checkpoint cannot be converted, or the folder cannot be written.
        UnsupportedConfigError: the model is not supported.
    """
    source, out = settings.checkpoint, settings.out
    scales = "ue8m0" if settings.ue8m0 else None
    fp8 = Fp8Config(scale_fmt=scales) if settings.weights is Weights.FP8 else None
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
        raise ToolInputError(str(error)) from error
    except OSError as error:
        raise ToolInputError(
            f"cannot write {out}: {error.strerror}: choose another --out"
        ) from error
    conversion = _Conversion(
        out=str(out),
        weights=settings.weights,
        files=len(list(out.glob(_SHARDS))),
        bytes_before=_num_bytes(source),
        bytes_after=_num_bytes(out),
        copied=copied,
    )
    if settings.json:
        print(json.dumps(asdict(conversion), indent=2))
    else:
        console().print(conversion.line)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversion:
    """The result of a conversion."""

    out: str
    """Folder written."""

    weights: Weights
    """Number format."""

    files: int
    """Number of safetensors files written."""

    bytes_before: int
    """Size of the weights read."""

    bytes_after: int
    """Size of the weights written."""

    copied: list[str]
    """Names of other files copied."""

    @property
    def line(self) -> str:
        before, after = format_bytes(self.bytes_before), format_bytes(self.bytes_after)
        copied = f"; copied {', '.join(self.copied)}" if self.copied else ""
        return (
            f"wrote {self.out}: {after} in {self.weights.upper()} (from {before}), "
            f"{format_count(self.files, 'file')}{copied}"
        )


def _copy_beside_weights(source: Path, out: Path) -> list[str]:
    """Copy the model's files other than weights; return their names."""
    names = sorted(
        file.name
        for file in source.iterdir()
        if file.is_file() and file.suffix in _BESIDE_WEIGHTS and file.name not in {CONFIG, INDEX}
    )
    for name in names:
        shutil.copyfile(source / name, out / name)
    return names


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob(_SHARDS))

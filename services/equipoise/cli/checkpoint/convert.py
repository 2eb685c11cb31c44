"""`equipoise checkpoint convert`: weights from BF16 to FP8 or back, and into other files."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn

from equipoise.cli.checkpoint.settings import ConvertCheckpointSettings, Weights
from equipoise.cli.display import bytes_words, console
from equipoise.cli.offline.settings import ToolInputError
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.checkpoint_convert import convert
from equipoise_model.checkpoint_writer import CONFIG, INDEX
from equipoise_model.config import Fp8Config

_SHARDS = "*.safetensors"
_BESIDE_WEIGHTS = {".jinja", ".json", ".model", ".txt"}
"""What tokenizers, chat templates and their like are written as."""


def run(settings: ConvertCheckpointSettings) -> int:
    """Read one folder, write the other, and say what became of it.

    Raises:
        CheckpointError, UnsupportedConfigError: the checkpoint is of no use for that.
        ToolInputError: the folder cannot be written.
    """
    source, out = settings.checkpoint, settings.out
    assert source is not None, "settings check it"
    assert out is not None, "settings check it"
    scales = "ue8m0" if settings.ue8m0 else None
    fp8 = Fp8Config(scale_fmt=scales) if settings.weights is Weights.FP8 else None
    checkpoint = Checkpoint.open(source)
    try:
        with _bar(f"writing {out}") as progress:
            convert(
                checkpoint,
                out,
                fp8=fp8,
                max_shard_bytes=settings.max_shard_bytes,
                progress=progress,
            )
        copied = _copy_beside_weights(source, out)
    except OSError as error:
        raise ToolInputError(
            f"{out} cannot be written: {error.strerror}; choose another --out"
        ) from error
    told = _Outcome(
        out=str(out),
        weights=settings.weights,
        files=len(list(out.glob(_SHARDS))),
        bytes_before=_num_bytes(source),
        bytes_after=_num_bytes(out),
        copied=copied,
    )
    if settings.json:
        print(json.dumps(asdict(told), indent=2))
    else:
        console().print(told.words)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What is told of a conversion; `copied` are names of files."""

    out: str
    weights: Weights
    files: int
    bytes_before: int
    bytes_after: int
    copied: list[str]

    @property
    def words(self) -> str:
        before, after = bytes_words(self.bytes_before), bytes_words(self.bytes_after)
        files = "a file" if self.files == 1 else f"{self.files} files"
        beside = f", with {', '.join(self.copied)}" if self.copied else ""
        return (
            f"{before} became {after} in {self.weights.upper()}; written to {self.out} as {files}"
            f"{beside}"
        )


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """At a terminal a bar that goes away; what it gives is told the bytes done and all of them."""
    screen = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _copy_beside_weights(source: Path, out: Path) -> list[str]:
    """Take along what belongs to a model besides its weights; gives the files' names."""
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

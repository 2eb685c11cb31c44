"""`convert`: a checkpoint from BF16 to FP8 or back, and into other shards, a tensor at a time."""

import dataclasses
from pathlib import Path

from equipoise_model.checkpoint import Checkpoint, CheckpointError, ProgressCallback
from equipoise_model.checkpoint_writer import write
from equipoise_model.config import Fp8Config


def convert(
    source: Checkpoint,
    path: Path,
    *,
    fp8: Fp8Config | None,
    max_shard_bytes: int | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a checkpoint again: linear maps in FP8, or everything in BF16 (`fp8` None).

    From FP8 to BF16 is what readers compute with; back is not exact, so it is not done twice.
    Multi-token-prediction modules are kept. For the rest see `write`.

    Raises:
        CheckpointError: the source is in FP8 already, or the folder is the source's.
        OSError: the folder cannot be written.
    """
    if fp8 is not None and source.is_fp8:
        raise CheckpointError(f"{source.path} is in FP8 already: copy it")
    if path.exists() and path.samefile(source.path):
        raise CheckpointError(f"{path} cannot be written while it is read: choose another folder")
    write(
        path,
        dataclasses.replace(source.config, quantization_config=fp8),
        read=source.read,
        mtp=source.has_mtp,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )

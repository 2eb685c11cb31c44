"""`convert`: convert a checkpoint from BF16 to FP8 or back, or reshard it, one tensor at a time."""

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
    """Write a checkpoint again with linear maps in FP8, or with everything in BF16 (`fp8` None).

    Converting FP8 to BF16 gives the numbers that readers compute with. Quantising them again would
    not be exact, so an FP8 source cannot be converted to FP8. Keeps multi-token-prediction modules.
    For the other arguments see `write`.

    Raises:
        CheckpointError: the source is already FP8, or the folder is the source's own.
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

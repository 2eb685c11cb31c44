"""`ConvertCheckpointSettings`: what a person may ask of `equipoise checkpoint convert`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from equipoise.cli.offline.settings import ToolInputError

_MOST_GIB = 4096


class Weights(StrEnum):
    """How linear maps are stored."""

    FP8 = "fp8"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCheckpointSettings:
    """One checkpoint, and the form it should have.

    Raises:
        ToolInputError: a folder is not named, or a value is outside its range.
    """

    checkpoint: Path | None = None
    """Folder to read: config.json, safetensors, and what else belongs to the model. Needed."""

    out: Path | None = None
    """Folder to write; a checkpoint there is replaced. Needed."""

    weights: Weights = Weights.FP8
    """fp8: linear maps as codes with a scale for each 128 x 128 of them. bf16: everything in
    bfloat16, which is what is computed with where no kernels for FP8 are."""

    ue8m0: bool = False
    """Make scales powers of two, as DeepSeek-V3.1's are."""

    shard_gib: float | None = None
    """Most GiB in one file; all is in one unless given."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        if self.checkpoint is None or self.out is None:
            raise ToolInputError(
                "say which folder to read and which to write: --checkpoint A --out B"
            )
        if self.shard_gib is not None and not 0 < self.shard_gib <= _MOST_GIB:
            raise ToolInputError(
                f"--shard-gib must be above 0 and at most {_MOST_GIB}, not {self.shard_gib:g}"
            )
        if self.ue8m0 and self.weights is not Weights.FP8:
            raise ToolInputError("--ue8m0 is about scales of FP8: choose --weights fp8")

    @property
    def max_shard_bytes(self) -> int | None:
        """Most bytes in one file; None for one file."""
        return None if self.shard_gib is None else round(self.shard_gib * 2**30)

"""The options of `equipoise checkpoint convert` and `equipoise checkpoint manifest`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import Range, check_ranges

_MOST_GIB = 4096


class WeightFormat(StrEnum):
    """Number format of linear layers."""

    FP8 = "fp8"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCheckpointSettings:
    """A checkpoint, and the format to convert it to.

    Raises:
        InvalidSettingsError: a number is out of range, or options contradict each other.
    """

    checkpoint: Path
    """Folder to read, with config.json and safetensors files."""

    out: Path
    """Folder to write. A checkpoint in it is replaced."""

    weights: WeightFormat = WeightFormat.FP8
    """fp8: linear layers in FP8 with one scale per 128 x 128 block. bf16: everything in bfloat16,
    for devices without FP8 kernels."""

    ue8m0: bool = False
    """Use powers of two as scales, as DeepSeek-V3.1 does."""

    shard_gib: Annotated[float | None, Range(0, _MOST_GIB, is_open=True)] = None
    """Maximum GiB per file. Default: one file."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.ue8m0 and self.weights is not WeightFormat.FP8:
            raise InvalidSettingsError("--ue8m0 needs --weights fp8")

    @property
    def max_shard_bytes(self) -> int | None:
        """Maximum bytes per file; None for one file."""
        return None if self.shard_gib is None else round(self.shard_gib * 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSettings:
    """A checkpoint whose manifest is written, or whose files are verified against it."""

    checkpoint: Path
    """Folder with config.json and safetensors files."""

    weights: WeightFormat | None = None
    """Also record the checksums of experts in this format, for workers that convert to it while
    they read. Default: only the stored format."""

    replace: bool = False
    """Compute the manifest from the files as they are. Use it only if the files are known to be
    good: damage in them becomes part of the manifest."""

    json: bool = False
    """Print JSON."""

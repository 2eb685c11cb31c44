"""Settings of `equipoise overlap`."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.options import ARGUMENT
from equipoise.settings.errors import InvalidSettingsError

_IMAGES = {".png", ".svg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """`equipoise overlap`.

    Raises:
        InvalidSettingsError: the plot is not an image.
    """

    trace: Path = field(metadata={ARGUMENT: True})
    """Profiler trace, .json or .json.gz: of PyTorch's profiler, of `equipoise worker
    --profile-steps`, or any other in Chrome's trace event format."""

    communication: str | None = None
    """Regular expression of the names that are communication; case is ignored. Default: the kernels
    and operators of NCCL, RCCL, DeepEP, NVSHMEM, MSCCL++, gloo and Equipoise."""

    experts: str | None = None
    """Regular expression of the names that are computation of experts; case is ignored.
    Default: grouped GEMMs, and what has "moe" or "expert" in its name."""

    plot: Path | None = None
    """Image to write, .svg or .png: computation and communication over time, and by layer."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix not in _IMAGES:
            raise InvalidSettingsError(f"--plot must end in .svg or .png, not {str(self.plot)!r}")

"""`ReplaySettings`: what a person may ask of `equipoise replay`. Starts nothing, reads nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.offline.settings import LoadsSettings, PoolSettings, ToolInputError
from equipoise.cli.options import REPEATED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """A series of windows, a pool, and the policies to compare.

    Raises:
        ToolInputError: a value is outside its range.
    """

    source: LoadsSettings = field(default_factory=LoadsSettings)
    """The loads: the windows of all files, in order."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    """The ranks."""

    policy: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """A policy to compare, as often as you like: name=interval=20,min_gain=0.05 (the balancer's
    options, what is not named has its default), or a BalancePolicy .yaml, or a .toml or .json file
    of options, or `default`."""

    window_s: float = 10.0
    """Seconds that each window lasted: recordings do not say."""

    reasons: bool = False
    """Show the reason of every verdict."""

    plot: Path | None = None
    """Picture to draw of balance and moves, .svg or .png."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.window_s <= 86400:
            raise ToolInputError(f"--window-s must be from 0.001 to 86400, not {self.window_s:g}")
        if self.plot is not None and self.plot.suffix not in {".svg", ".png"}:
            raise ToolInputError(f"--plot must end in .svg or .png, not {str(self.plot)!r}")

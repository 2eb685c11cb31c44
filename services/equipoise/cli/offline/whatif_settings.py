"""`WhatIfSettings`: what a person may ask of `equipoise whatif`. Starts nothing, reads nothing."""

from dataclasses import dataclass, field

from equipoise.cli.offline.settings import LoadsSettings, ToolInputError
from equipoise.planning.policy import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfSettings:
    """Which pools to try for which loads, and what a choice may cost.

    Raises:
        ToolInputError: a value is outside its range.
    """

    source: LoadsSettings = field(default_factory=LoadsSettings)
    """The loads."""

    ranks: tuple[str, ...] = ("8", "16", "32", "64")
    """Expert-parallel sizes to try, GPUs."""

    ranks_per_node: int = 8
    """GPUs of a node; a pool that does not divide into nodes is tried as one."""

    max_redundant: int | None = None
    """Most redundant slots per layer to try; a quarter of the experts unless given."""

    algorithm: Algorithm = Algorithm.AUTO
    """How replicas are placed."""

    policy: str = "default"
    """Policy for the moves per hour, written as for `equipoise replay`."""

    window_s: float = 10.0
    """Seconds that each window lasted: recordings do not say."""

    tolerance: float = 0.01
    """Balancedness given up for less memory: what comes this near to the best is as good."""

    memory_gib: float | None = None
    """GiB of experts that fit on a GPU; without it, any number does."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ToolInputError(f"--ranks-per-node must be at least 1, not {self.ranks_per_node}")
        if self.max_redundant is not None and self.max_redundant < 0:
            raise ToolInputError(f"--max-redundant must be at least 0, not {self.max_redundant}")
        if not 0.001 <= self.window_s <= 86400:
            raise ToolInputError(f"--window-s must be from 0.001 to 86400, not {self.window_s:g}")
        if not 0 <= self.tolerance <= 1:
            raise ToolInputError(f"--tolerance must be from 0 to 1, not {self.tolerance:g}")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ToolInputError(f"--memory-gib must be above 0, not {self.memory_gib:g}")

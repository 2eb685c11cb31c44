"""`PlanSettings`: what a person may ask of `equipoise plan`. Starts nothing, reads nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.tool_settings import LoadsSettings, ToolInputError
from equipoise.formats.format import Format
from equipoise.planning.policy import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """One plan: for which loads, on which ranks, by which rules, and where it goes.

    Raises:
        ToolInputError: a value is outside its range, or two contradict each other.
    """

    source: LoadsSettings = field(default_factory=LoadsSettings)
    """The loads."""

    current: Path | None = None
    """Layout in use: moves are counted from it, and what need not move stays. Without it, from the
    layout a pool starts with: experts in order."""

    current_format: Format | None = None
    """Format of the current layout; found by what is in it unless given."""

    nodes: int = 1
    """Nodes, with equally many ranks each."""

    ranks: int | None = None
    """Expert-parallel ranks, one a GPU."""

    slots: int | None = None
    """Physical slots per layer over all ranks; as few as hold all experts unless given."""

    algorithm: Algorithm = Algorithm.AUTO
    """How replicas are placed; auto makes the plans that are possible and keeps the best."""

    exclude_ranks: tuple[str, ...] = ()
    """Ranks to plan without, such as 3,7 or 8-15: they are lost, or go away."""

    out: Path | None = None
    """Where to write the layout."""

    format: Format = Format.EQUIPOISE
    """Whose format to write."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        if self.ranks is None:
            raise ToolInputError("say how many ranks there are: --ranks N")

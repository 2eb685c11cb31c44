"""`PlanSettings`: what a person may ask of `equipoise plan`. Starts nothing, reads nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.tool_settings import LoadsSettings, PoolSettings
from equipoise.formats.format import Format
from equipoise.planning.policy import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """One plan: for which loads, on which ranks, by which rules, and where it goes."""

    source: LoadsSettings = field(default_factory=LoadsSettings)
    """The loads."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    """The ranks."""

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

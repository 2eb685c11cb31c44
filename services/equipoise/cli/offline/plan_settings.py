"""`PlanSettings`: what a person may ask of `equipoise plan`. Starts nothing, reads nothing."""

from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli.offline.settings import LoadsSettings, PoolSettings, ToolInputError
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

    pool: PoolSettings = field(default_factory=PoolSettings)
    """The ranks."""

    algorithm: Algorithm = Algorithm.AUTO
    """How replicas are placed; auto makes the plans that are possible and keeps the best."""

    locality: float | None = None
    """How far redundant slots may host experts of other nodes: 0 is hierarchical, each expert group
    on one node; 1 is global; between them most of the load stays on its group's node."""

    max_moves: int | None = None
    """Most slots that may change; the plan spends them where they buy most."""

    target_balancedness: float | None = None
    """Stop as soon as this is reached, with the fewest moves."""

    weighted: bool = False
    """Let an expert's replicas serve unequal shares of its load where that relieves the busiest
    rank; only this project's own format and workers know shares."""

    shared_ranks: int | None = None
    """Ranks, the last ones, that hold the shared expert and nothing else, where slots are of two
    kinds: with --shared-expert and one slot a rank. Otherwise the plan chooses its replicas."""

    slots_of_rank: tuple[str, ...] = ()
    """Slots of each rank, in place of --slots, where ranks have unequal memory: 9x16,10x16 are 16
    ranks with 9 and 16 with 10. No engine's file can hold such a layout, so none is written."""

    exclude_ranks: tuple[str, ...] = ()
    """Ranks to plan without, such as 3,7 or 8-15: they are lost, or go away."""

    out: Path | None = None
    """Where to write the layout."""

    format: Format = Format.EQUIPOISE
    """Whose format to write."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        is_limited = self.max_moves is not None or self.target_balancedness is not None
        self._check_ranks(is_limited=is_limited)
        if self.max_moves is not None and self.target_balancedness is not None:
            raise ToolInputError("say --max-moves or --target-balancedness, not both")
        if self.max_moves is not None and self.max_moves < 0:
            raise ToolInputError(f"--max-moves must be at least 0, not {self.max_moves}")
        target = self.target_balancedness
        if target is not None and not 0 < target <= 1:
            raise ToolInputError(f"--target-balancedness must be above 0, at most 1, not {target}")
        if self.locality is not None and not 0 <= self.locality <= 1:
            raise ToolInputError(f"--locality must be from 0 to 1, not {self.locality:g}")
        if self.locality is not None and (
            is_limited or self.algorithm not in {Algorithm.AUTO, Algorithm.LOCAL}
        ):
            raise ToolInputError("--locality goes with --algorithm local only, without limits")
        if self.weighted and self.out is not None and self.format is not Format.EQUIPOISE:
            raise ToolInputError(
                f"--weighted goes with --format {Format.EQUIPOISE} only: {self.format} has no "
                "place for shares"
            )
        if is_limited and self.algorithm not in {Algorithm.AUTO, Algorithm.INCREMENTAL}:
            raise ToolInputError(
                f"--algorithm {self.algorithm} plans anew: only incremental plans stop early"
            )

    def _check_ranks(self, *, is_limited: bool) -> None:
        """Check what is said of single ranks and their slots."""
        contrary = (self.pool.slots, self.pool.current, self.out)
        if self.slots_of_rank and any(one is not None for one in contrary):
            raise ToolInputError("--slots-of-rank goes without --slots, --current and --out")
        if self.shared_ranks is not None:
            if self.shared_ranks < 1 or not self.source.shared_expert:
                raise ToolInputError("--shared-ranks must be at least 1, with --shared-expert")
            if is_limited or self.locality is not None or self.weighted:
                raise ToolInputError(
                    "--shared-ranks goes without limits, --locality and --weighted"
                )

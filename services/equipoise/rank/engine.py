"""What a rank needs of the engine that runs its model: `SwitchingEngine`, implemented twice.

`equipoise.worker.engine.Engine` steps by itself; `equipoise.engines.seat.EngineSeat` is called by
an engine of another project. Both switch by the same agreement.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from equipoise.rank.held import Contents, HeldExperts, StagedGeneration
from equipoise.wire.messages import RankStats


class GenerationLoad(Protocol):
    """The assignments that one rank's slots received in one generation."""

    @property
    def generation(self) -> int:
        """The generation."""

    @property
    def slot_load_LS(self) -> npt.NDArray[np.int64]:  # noqa: N802 - the suffix names the shape
        """Assignments, int64 [layers, slots per rank], cumulative."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineProgress:
    """A rank's counters after a step."""

    loads: tuple[GenerationLoad, ...]
    """Of the current generation, then of ended ones."""
    stats: RankStats


class SwitchingEngine(Protocol):
    """An engine that counts loads, and switches to a staged generation between two steps.

    For any thread.
    """

    @property
    def generation(self) -> int:
        """Generation of the latest step."""

    @property
    def staged_generation(self) -> int:
        """Generation that is ready for the switch; 0 if there is none."""

    def offer(self, staged: StagedGeneration[Any]) -> bool:
        """Make a generation ready for the switch, in place of any other.

        Returns False, and changes nothing, if the ranks have left its base generation.
        """

    def drop(self, generation: int) -> None:
        """Forget the staged generation, if it has this number."""

    def progress(self) -> EngineProgress:
        """Return counters for a report."""


def used_and_staged(held: HeldExperts[Any], engine: SwitchingEngine) -> tuple[Contents, int]:
    """Return what a rank uses, and the generation staged to replace it; 0 if there is none.

    For any thread: during a switch, too, a staged generation is above the one in use.
    """
    staged = engine.staged_generation  # Read first: a switch meanwhile makes it the one in use.
    contents = held.contents
    return contents, staged if staged > contents.layout.generation else 0

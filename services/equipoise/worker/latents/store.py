"""`LatentStore`: this worker's latents, as ranks of other pools see them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from equipoise.worker.scheduler import Scheduler
from equipoise_model.latent_cache import LatentCache

_Visited = TypeVar("_Visited")


class Visit(Protocol):
    """Lets a function use the scheduler between two uses of the engine's thread."""

    def __call__(self, act: Callable[[Scheduler], _Visited]) -> _Visited:
        """Return what `act` returns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentStore:
    """The cache, and what identifies its contents."""

    cache: LatentCache
    """The latents."""

    form: str
    """Equal forms have the same bytes for the same tokens."""

    boot_id: str
    """This process."""

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest context."""
        return -(-self.cache.max_len // self.cache.block_tokens)

"""`ByPool`: one object for each pool, by the pool's name, kept until it is idle."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _Idle(Protocol):
    @property
    def is_idle(self) -> bool:
        """Whether a new one could take its place."""


_Bound = TypeVar("_Bound", bound=_Idle)


class ByPool(Generic[_Bound]):
    """Makes an object for a pool that has none, and drops those of other pools that are idle."""

    def __init__(self, make: Callable[[], _Bound]) -> None:
        self._make = make
        self._of_pool: dict[str, _Bound] = {}

    def of(self, pool: str) -> _Bound:
        """The object of a pool, which remembers what streams used that have ended."""
        found = self._of_pool.get(pool)
        if found is None:
            self._of_pool = {name: one for name, one in self._of_pool.items() if not one.is_idle}
            found = self._of_pool[pool] = self._make()
        return found

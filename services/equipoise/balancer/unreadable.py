"""`UnreadablePools`: pools whose records in the store cannot be read, each with the reason.

This balancer does not lead them until their records are repaired or deleted; their workers keep
serving. The balancer does not change the records.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from equipoise.balancer.store.store import StoreError, UnreadablePoolError
from equipoise.telemetry.logs import about

POOL_UNREADABLE = "pool_unreadable"
"""Kind of a worker's rejection that ends once the records of its pool are repaired."""

_log = logging.getLogger(__name__)


class UnreadablePools:
    """Reasons by pool. A process has one: it finds the same pools as leader and as follower."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why each of these pools cannot be read, with the remedy."""
        return MappingProxyType(self._reasons)

    @contextmanager
    def noting(self, pool: str) -> Iterator[None]:
        """Note whether the pool can be read and used, inside the block.

        Raises:
            StoreError: the store as a whole cannot be used; what was noted of the pool stays.
        """
        try:
            yield
        except UnreadablePoolError as error:
            self._note(pool, str(error))
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug must not keep other pools from a leader
            self._note(
                pool,
                f"pool {pool} cannot be led because of a bug in the balancer: {error!r}",
                error,
            )
        else:
            if self._reasons.pop(pool, None) is not None:
                _log.info("pool %s can be read again", pool, extra=about(pool=pool))

    def retain(self, pools: frozenset[str]) -> None:
        """Drop all other pools: they are no longer in the store."""
        for pool in self._reasons.keys() - pools:
            del self._reasons[pool]

    def _note(self, pool: str, reason: str, bug: Exception | None = None) -> None:
        if self._reasons.get(pool) != reason:
            _log.error("%s", reason, extra=about(pool=pool), exc_info=bug)
        self._reasons[pool] = reason

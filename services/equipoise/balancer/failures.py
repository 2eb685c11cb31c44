"""`Failures`: what fails for one pool does not fail for the others, and does not flood the log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from equipoise.telemetry.logs import Causes, about

_log = logging.getLogger(__name__)


class Failures:
    """Failures of `what`, such as "the status", which is made for each pool. All are bugs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._causes = Causes()

    @contextmanager
    def confined(self, pool: str) -> Iterator[None]:
        """End at an exception inside the block; log the 1st, 2nd, 4th... of the pool."""
        try:
            yield
        except Exception:  # noqa: BLE001 - a bug; there are other pools
            if number := self._causes.count(pool):
                _log.exception(
                    "%s of pool %s failed (%d so far)",
                    *(self._what, pool, number),
                    extra=about(pool=pool),
                )

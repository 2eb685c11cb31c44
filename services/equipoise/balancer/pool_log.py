"""`PoolLog`: log lines of one pool, each with the pool in its text and in its fields."""

import logging
from collections.abc import MutableMapping
from typing import Any

from equipoise.telemetry.logs import about


class PoolLog(logging.LoggerAdapter[logging.Logger]):
    """`extra=about(...)` of a call adds what else the line is about: rank, epoch, generation."""

    def __init__(self, logger: logging.Logger, *, pool: str) -> None:
        super().__init__(logger, about(pool=pool))
        self._pool = pool

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Add the pool."""
        fields = kwargs.get("extra", {}).get("about", {})
        return f"{self._pool}: {msg}", {**kwargs, "extra": about(pool=self._pool, **fields)}

"""`PoolLog`: log lines of one pool, each with the pool in its text and in its fields.

The fields also say what the pool runs at that moment: epoch, generation and term.
"""

import logging
from collections.abc import MutableMapping
from typing import Any

from equipoise.balancer.leadership.elector import Tenure
from equipoise.pool.pool import Pool
from equipoise.telemetry.logs import about


class PoolLog(logging.LoggerAdapter[logging.Logger]):
    """`extra=about(...)` of a call adds what else the line is about, or another generation."""

    def __init__(self, logger: logging.Logger, *, pool: Pool, tenure: Tenure) -> None:
        super().__init__(logger)
        self._pool = pool
        self._tenure = tenure

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Add the pool and what it runs."""
        current = self._pool.layouts.current
        fields = {
            "pool": self._pool.name,
            "epoch": self._pool.roster.epoch or None,
            "generation": current.generation if current is not None else None,
            "term": self._tenure.term,
            **kwargs.get("extra", {}).get("about", {}),
        }
        return f"{self._pool.name}: {msg}", {**kwargs, "extra": about(**fields)}

"""`Waits`: every bounded wait of a worker: how often it timed out, and the latest outcome.

Counts since the worker started, over all epochs.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from equipoise.wire.messages import Wait, WorkerBound
from equipoise.worker.settings import WorkerSettings

SOURCE_TIMEOUT_S = 5.0
"""Timeout for fetching an expert from one source."""

ACK_TIMEOUT_S = 5.0
"""Timeout for a balancer that sends nothing, although it must acknowledge every heartbeat."""


class Waits:
    """Timeouts by wait; for any thread. Waits without a bound are not reported."""

    def __init__(self, bounds_s: Mapping[Wait, float]) -> None:
        self._lock = threading.Lock()
        self._bounds = {
            wait: WorkerBound(name=wait, bound_s=bound_s) for wait, bound_s in bounds_s.items()
        }

    @classmethod
    def of(cls, settings: WorkerSettings) -> "Waits":
        """Return the waits of a worker with these settings; one of 0 s is left out."""
        bounds_s = {
            Wait.STEP: settings.step_timeout_s,
            Wait.PULL: SOURCE_TIMEOUT_S,
            Wait.ACK: ACK_TIMEOUT_S,
            Wait.OUTAGE: settings.outage_timeout_s,
            Wait.DRAIN: settings.drain_timeout_s,
        }
        return cls({wait: bound_s for wait, bound_s in bounds_s.items() if bound_s > 0})

    def note(self, wait: Wait, outcome: str) -> None:
        """Count a timeout and keep its outcome."""
        with self._lock:
            known = self._bounds.get(wait)
            if known is not None:
                self._bounds[wait] = replace(known, reached=known.reached + 1, latest=outcome)

    def all(self) -> tuple[WorkerBound, ...]:
        """Return every bounded wait."""
        with self._lock:
            return tuple(self._bounds.values())

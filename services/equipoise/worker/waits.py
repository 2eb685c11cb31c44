"""`Waits`: every wait of a worker that has a bound, how often it was reached, and its outcome.

It counts since the worker started, over all epochs, and measures nothing itself.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from equipoise.wire.messages import Wait, WorkerBound
from equipoise.worker.settings import WorkerSettings

SOURCE_TIMEOUT_S = 5.0
"""Longest that one source of an expert is waited for."""

ACK_TIMEOUT_S = 5.0
"""Longest that a balancer may say nothing, although every heartbeat asks for an answer."""


class Waits:
    """Counts by wait; for any thread. Waits without a bound are not told of."""

    def __init__(self, bounds_s: Mapping[Wait, float] | None = None) -> None:
        self._lock = threading.Lock()
        self._bounds = {
            wait: WorkerBound(name=wait, bound_s=bound_s)
            for wait, bound_s in (bounds_s or {}).items()
        }

    @classmethod
    def of(cls, settings: WorkerSettings) -> "Waits":
        """Those of a worker with these settings; a wait of no length is none."""
        bounds_s = {
            Wait.STEP: settings.step_timeout_s,
            Wait.PULL: SOURCE_TIMEOUT_S,
            Wait.ACK: ACK_TIMEOUT_S,
            Wait.OUTAGE: settings.outage_timeout_s,
            Wait.DRAIN: settings.drain_timeout_s,
        }
        return cls({wait: bound_s for wait, bound_s in bounds_s.items() if bound_s > 0})

    def note(self, wait: Wait, what: str) -> None:
        """A bound was reached; `what` says what came of it."""
        with self._lock:
            known = self._bounds.get(wait)
            if known is not None:
                self._bounds[wait] = replace(known, reached=known.reached + 1, latest=what)

    def all(self) -> tuple[WorkerBound, ...]:
        """Every bound."""
        with self._lock:
            return tuple(self._bounds.values())

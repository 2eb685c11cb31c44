"""`Waits`: every wait of a worker that has a timeout: how often it was reached.

Counts since the worker started, over all epochs.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from equipoise.wire.messages import Wait, WorkerTimeout
from equipoise.worker.settings import WorkerSettings

SOURCE_TIMEOUT_S = 5.0
"""Timeout for fetching an expert from one source."""

READ_TIMEOUT_S = 60.0
"""Timeout for reading an expert from the checkpoint while joining an epoch."""

ACK_TIMEOUT_S = 5.0
"""Timeout for a balancer that sends nothing, although it must acknowledge every heartbeat."""


class Waits:
    """Timeouts by wait; for any thread. Waits without a timeout are not reported."""

    def __init__(self, timeouts_s: Mapping[Wait, float]) -> None:
        self._lock = threading.Lock()
        self._timeouts = {
            wait: WorkerTimeout(name=wait, timeout_s=timeout_s)
            for wait, timeout_s in timeouts_s.items()
        }

    @classmethod
    def of(cls, settings: WorkerSettings) -> "Waits":
        """Return the waits of a worker with these settings; one of 0 s is left out."""
        timeouts_s = {
            Wait.STEP: settings.step_timeout_s,
            Wait.PULL: SOURCE_TIMEOUT_S,
            Wait.READ: READ_TIMEOUT_S,
            Wait.ACK: ACK_TIMEOUT_S,
            Wait.OUTAGE: settings.outage_timeout_s,
            Wait.DRAIN: settings.drain_timeout_s,
        }
        return cls({wait: timeout_s for wait, timeout_s in timeouts_s.items() if timeout_s > 0})

    def note(self, wait: Wait, outcome: str) -> None:
        """Count a timeout and keep its outcome."""
        with self._lock:
            known = self._timeouts.get(wait)
            if known is not None:
                self._timeouts[wait] = replace(known, reached=known.reached + 1, latest=outcome)

    def all(self) -> tuple[WorkerTimeout, ...]:
        """Return every wait that has a timeout."""
        with self._lock:
            return tuple(self._timeouts.values())

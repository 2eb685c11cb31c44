"""`Waits`: every wait of a rank that has a timeout: how often it was reached.

Counts since the process started, over all epochs.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from equipoise.wire.messages import Wait, WorkerTimeout

SOURCE_TIMEOUT_S = 5.0
"""Timeout for fetching an expert from one source."""

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

"""What is kept of the epochs that a balancer opened: for people, and until the store has it."""

from collections import deque
from dataclasses import dataclass, field, replace

from equipoise.pool.effects import Chain

MAX_EPOCHS = 16
"""Changes of membership kept for people to read."""


@dataclass(slots=True)
class Unwritten:
    """The chain that opens an epoch, until its membership is written; `failed` asks to retry."""

    chain: Chain = ()
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """An epoch, why it was opened at which unix time, and how long until all its ranks served.

    `workers` are in rank order; `serving_after_s` is 0 while they do not serve.
    """

    epoch: int
    workers: tuple[str, ...]
    reason: str
    opened_s: float
    serving_after_s: float = 0.0


@dataclass(slots=True)
class EpochLog:
    """The latest epochs."""

    _records: deque[EpochRecord] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))

    def opened(self, record: EpochRecord) -> None:
        """A new epoch was opened."""
        self._records.appendleft(record)

    def note_serving(self, epoch: int, *, now: float) -> None:
        """All ranks of an epoch serve; it counts once, and only for an epoch opened here."""
        if self._records and self._records[0].epoch == epoch:
            newest = self._records[0]
            if newest.serving_after_s == 0.0:
                self._records[0] = replace(newest, serving_after_s=now - newest.opened_s)

    def newest_first(self) -> tuple[EpochRecord, ...]:
        """The latest epochs that this balancer opened."""
        return tuple(self._records)

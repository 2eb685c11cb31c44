"""`EpochHistory`: the latest epochs that a balancer opened.

`UnwrittenEpoch`: the newest one, until the store has recorded it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from equipoise.pool.effects import Chain
from equipoise.pool.records import EpochMembers

MAX_EPOCHS = 16
"""Epochs kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """An epoch that this balancer opened."""

    epoch: int
    """Its number."""

    workers: tuple[str, ...]
    """Its workers, in rank order."""

    reason: str
    """Why it was opened."""

    opened_s: float
    """When, in unix seconds."""

    serving_after_s: float = 0.0
    """Seconds until all its ranks served; 0 while they do not."""


class EpochHistory:
    """The epochs of one pool."""

    def __init__(self) -> None:
        self._records: deque[EpochRecord] = deque(maxlen=MAX_EPOCHS)

    @property
    def records(self) -> Sequence[EpochRecord]:
        """The latest epochs, newest first."""
        return self._records

    def note_opened(self, members: EpochMembers, *, reason: str, now: float) -> None:
        """An epoch opened."""
        record = EpochRecord(
            epoch=members.epoch, workers=members.workers, reason=reason, opened_s=now
        )
        self._records.appendleft(record)

    def note_serving(self, epoch: int, *, now: float) -> None:
        """All ranks of an epoch serve, perhaps of one that another balancer opened."""
        newest = self._records[0] if self._records else None
        if newest is not None and newest.epoch == epoch and not newest.serving_after_s:
            self._records[0] = replace(newest, serving_after_s=now - newest.opened_s)

    def since_opened_s(self, *, now: float) -> float:
        """Seconds since the newest epoch opened; 0 if there is none."""
        return now - self._records[0].opened_s if self._records else 0.0


class UnwrittenEpoch:
    """The chain that opens an epoch, kept until the store has recorded it."""

    def __init__(self) -> None:
        self._chain: Chain = ()
        self._failed = False

    @property
    def is_pending(self) -> bool:
        """Whether an epoch is not recorded yet, so that no rank was sent it."""
        return bool(self._chain)

    def begin(self, chain: Chain) -> None:
        """This chain opens an epoch; an empty one if it is recorded or given up."""
        self._chain, self._failed = chain, False

    def note_failed(self, lost: Chain) -> None:
        """The store did not accept a write; `lost` are that and what depended on it."""
        if any(effect is one for effect in lost for one in self._chain):
            self._failed = True

    def again(self) -> Chain:
        """The chain once more, if the store did not accept it."""
        if not self._failed:
            return ()
        self._failed = False
        return self._chain

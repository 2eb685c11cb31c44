"""`HoldLedger`: blocks of finished requests, kept for a rank of another pool. Pure.

Every hold ends: taken = fetched + released + expired + open.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.worker.blocks import BlockPool


class HoldEnd(StrEnum):
    """How a hold ended."""

    FETCHED = "fetched"
    """All its blocks were sent to another rank."""

    RELEASED = "released"
    """A gateway or another rank ended it."""

    EXPIRED = "expired"
    """It was not fetched in time, or the last running request needed its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    blocks: tuple[int, ...]
    until_s: float


class HoldLedger:
    """The holds of one worker, oldest first; each ends after `hold_s` seconds at the latest."""

    def __init__(self, blocks: BlockPool, *, hold_s: float) -> None:
        self._blocks = blocks
        self._hold_s = hold_s
        self._open: dict[int, _Hold] = {}
        self.num_taken = 0
        """Holds so far."""
        self.ended: Counter[HoldEnd] = Counter()
        """Those that have ended."""

    @property
    def num_open(self) -> int:
        """Holds that have not ended."""
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Tokens in held blocks; a block counts once for each hold."""
        return self._blocks.block_tokens * sum(len(one.blocks) for one in self._open.values())

    def take(self, blocks: Sequence[int], *, now: float) -> int:
        """Take over one hold of each block from the caller; returns the hold's number, from 1."""
        self.num_taken += 1
        self._open[self.num_taken] = _Hold(blocks=tuple(blocks), until_s=now + self._hold_s)
        return self.num_taken

    def end(self, hold: int, how: HoldEnd) -> bool:
        """End a hold; False if there is no such hold. Its blocks stay cached until reused."""
        ended = self._open.pop(hold, None)
        if ended is None:
            return False
        for block in reversed(ended.blocks):
            self._blocks.release(block)
        self.ended[how] += 1
        return True

    def expire(self, now: float) -> None:
        """End the holds that are over."""
        for hold in [number for number, one in self._open.items() if one.until_s <= now]:
            self.end(hold, HoldEnd.EXPIRED)

    def give_way(self) -> bool:
        """End the oldest hold early; False if there is none."""
        return bool(self._open) and self.end(next(iter(self._open)), HoldEnd.EXPIRED)

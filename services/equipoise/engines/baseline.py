"""`Baseline`: the checksums that the ranks of an engine agree on before anything moves.

An engine's weights are not in the format of its checkpoint, so the ranks hash their slots and
compare them. When the weights are updated in place, they do so again. What a rank finds out at any
moment counts only once all ranks have read it in the same round.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from equipoise.engines.comparison import Comparison, compare, held_row
from equipoise.engines.lockstep import Lockstep, Pending
from equipoise.engines.slots import EngineSlots
from equipoise.planning.arrays import Bools, Checksums
from equipoise.planning.layout import Layout, is_moved
from equipoise.rank.errors import GroupError, NotHeldError
from equipoise.rank.held import Contents, HeldExperts

MAX_ATTEMPTS = 7
"""Baselines in succession that may fail, because an update of the weights is in progress."""

FIRST_PAUSE_S = 1.0
"""Pause before the second attempt; twice as long before each further one."""

_RETRY_PAUSE_S = 0.2

_log = logging.getLogger(__name__)


class WeightsRow(NamedTuple):
    """What a rank sends about its weights in a round."""

    version: int
    """Number of the weights in its slots, from 1."""
    hashed: int
    """Number of the weights that it has hashed; 0 for none."""
    announced: int
    """The latest number that the engine announced as an update; 0 for none."""
    clock_s: int
    """Unix seconds; those of rank 0 number the epoch."""
    highest: int
    """The highest epoch or generation that the balancer has sent to this rank."""


class Agreed(NamedTuple):
    """A baseline that all ranks have agreed on in the same round."""

    workers: tuple[str, ...]
    number: int
    """Of the epoch that begins, and of its first generation."""
    is_first: bool


class _Comparing(NamedTuple):
    """A comparison in flight; everything but `contents` is the same on all ranks."""

    version: int
    is_announced: bool
    least_number: int
    contents: Contents
    rows: Pending


class Baseline:
    """One rank's part in agreeing on a baseline.

    `act`, `read` and `note_switch` are for the engine's thread, the rest for any.
    """

    def __init__(
        self,
        slots: Sequence[EngineSlots],
        *,
        layout: Layout,
        rank: int,
        worker: str,
        tables: Callable[[Layout], Any],
        on_failure: Callable[[str], None],
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`layout` is what the slots hold when the first hashing begins.

        `on_failure` is called from another thread if the slots cannot be read.
        """
        self.version = 1
        """Number of the weights in the slots; grows with every update that is noticed."""
        self.taken = 0
        """Number of the weights that the ranks agreed on; 0 for none yet."""
        self.table: Checksums | None = None
        """Checksums of all experts, uint8 [layers, experts, 16]; None before the first baseline."""
        self.first_tables: Any = None
        """The engine's tables of `layout`; made before the first baseline."""
        self._slots = slots
        self._layout = layout
        self._rank = rank
        self._worker = worker
        self._tables = tables
        self._on_failure = on_failure
        self._first_pause_s = first_pause_s
        # Guards the fields below, which the hashing thread shares.
        self._lock = threading.Lock()
        self._announced = self._highest = 0
        self._held: HeldExperts[Any] | None = None
        self._hashed: tuple[int, Contents] | None = None
        self._is_hashing = False
        self._comparing: _Comparing | None = None
        self._attempts = 0
        # Slots that switches have filled since the last baseline, [layers, slots].
        self._filled: Bools = np.zeros(layout.expert_of_slot.shape, dtype=bool)

    @property
    def held(self) -> HeldExperts[Any] | None:
        """The experts in the slots; None until they are hashed for the first time."""
        return self._held

    @property
    def is_valid(self) -> bool:
        """Whether the slots hold the weights that the ranks agreed on."""
        return self.taken == self.version

    def note_update(self, *, is_announced: bool) -> None:
        """The weights in the slots are others: the engine said so, or hashing found out."""
        with self._lock:
            self.version += 1
            if is_announced:
                self._announced = self.version
        self._hash_again()

    def note_switch(self, before: Layout, after: Layout) -> None:
        """The slots hold another layout: what was hashed for the next baseline is out of date."""
        self._filled |= is_moved(before.expert_of_slot, after.expert_of_slot)
        with self._lock:
            self._hashed = None
        if not self.is_valid:
            self._hash_again()

    def note_number(self, number: int) -> None:
        """The balancer has used this number for an epoch or a generation."""
        with self._lock:
            self._highest = max(self._highest, number)

    def row(self) -> WeightsRow:
        """Return what this rank sends in the coming round."""
        with self._lock:
            hashed = self._hashed[0] if self._hashed is not None else 0
            clock_s = int(time.time())
            return WeightsRow(self.version, hashed, self._announced, clock_s, self._highest)

    def act(self, rows: Sequence[WeightsRow], lockstep: Lockstep) -> None:
        """Follow the newest weights that any rank has; compare once all have hashed them."""
        newest, announced = max(row.version for row in rows), max(row.announced for row in rows)
        with self._lock:
            self.version = max(self.version, newest)
            self._announced = max(self._announced, announced)
        if not self.is_valid:
            self._hash_again()
        is_hashed = newest > self.taken and all(row.hashed == newest for row in rows)
        if self._comparing is None and is_hashed:
            with self._lock:
                assert self._hashed is not None, "its row said so, and no switch came between"
                version, contents = self._hashed
            pending = lockstep.gather(held_row(self._worker, version, contents.checksums))
            is_announced = announced > self.taken
            self._comparing = _Comparing(
                newest, is_announced, least_number(rows), contents, pending
            )

    def read(self) -> Agreed | None:
        """Take over a comparison that began in the previous round; every rank finds the same.

        Raises:
            GroupError: ranks hold different bytes as the same expert, and no update explains it.
        """
        comparing, self._comparing = self._comparing, None
        if comparing is None:
            return None
        layout = comparing.contents.layout
        found = compare(comparing.rows.result(), layout, self.table, filled=self._filled)
        if found.versions != {comparing.version}:
            return None  # Some have hashed newer weights since they said so: all compare those.
        fault = _fault(found, is_announced=comparing.is_announced)
        is_first = self.table is None
        if fault and self._attempts + 1 >= MAX_ATTEMPTS:
            raise GroupError(fault)
        if fault:
            _log.warning("the weights are hashed again: %s", fault)
            self._attempts += 1
            with self._lock:
                self.version = max(self.version, comparing.version + 1)
                if comparing.is_announced:
                    self._announced = max(self._announced, comparing.version + 1)
            self._hash_again()
            return None
        self._attempts, self.taken, self.table = 0, comparing.version, found.table
        self._filled = np.zeros_like(self._filled)
        held = self._held
        assert held is not None, "it was hashed"
        number = max(comparing.least_number, held.contents.layout.generation + 1)
        numbered = layout.with_placement(layout.expert_of_slot, generation=number)
        held.rebase(Contents(layout=numbered, checksums=comparing.contents.checksums))
        return Agreed(found.workers, number, is_first)

    def _hash_again(self) -> None:
        with self._lock:
            is_done = self._hashed is not None and self._hashed[0] == self.version
            if self._is_hashing or is_done:
                return
            self._is_hashing = True
        pause_s = self._first_pause_s * 2.0 ** (self._attempts - 1) if self._attempts else 0.0
        thread = threading.Thread(
            target=self._hash, args=(pause_s,), name="equipoise-hash", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # No threads are left; the engine serves on.
            self._on_failure(f"rank {self._rank} cannot hash its experts: {error}")

    def _hash(self, pause_s: float) -> None:
        """Hash all slots, until nothing changed meanwhile; on a thread of its own."""
        time.sleep(pause_s)
        try:
            while not self._hash_once():
                pass
        except Exception as error:  # noqa: BLE001 - the engine serves on
            _log.exception("cannot read this rank's experts")
            self._on_failure(f"rank {self._rank} cannot read its experts: {error}")

    def _hash_once(self) -> bool:
        """Returns whether the result is that of the newest weights and layout."""
        version = self.version
        try:
            if self._held is None:
                self.first_tables = self._tables(self._layout)
                self._held = HeldExperts(
                    self._slots, layout=self._layout, rank=self._rank, tables=self._tables
                )
                contents = self._held.contents
            else:
                contents = self._held.hash_all()
        except NotHeldError:
            time.sleep(_RETRY_PAUSE_S)
            return False
        with self._lock:
            if self.version != version or contents.layout is not self._held.contents.layout:
                return False
            self._hashed, self._is_hashing = (version, contents), False
            return True


def least_number(rows: Sequence[WeightsRow]) -> int:
    """The least number that an epoch may have which begins now.

    It is the clock, so that no restart reuses a number, or above those that the balancer has used,
    aborted waves included: another may be on its way to the ranks.
    """
    return max(rows[0].clock_s, max(row.highest for row in rows) + 2)


def _fault(found: Comparison, *, is_announced: bool) -> str:
    """Why what the ranks hold cannot be the baseline; empty if it can."""
    if not is_announced and 0 < found.share_changed < 0.5:
        return (
            f"{found.share_changed:.1%} of the slots hold other bytes than before (the first is "
            f"{found.first_changed}), and the engine announced no update: memory of a machine is "
            "damaged, or only some weights were updated; restart the engine"
        )
    if not is_announced and found.share_changed > 0 and found.first_kept:
        return (
            f"the weights were updated, perhaps while experts moved, and the engine announced no "
            f"update: {found.first_kept} may still have its old weights; restart the engine"
        )
    return found.conflict

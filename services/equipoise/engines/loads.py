"""`SeatLoads`: what the slots of a rank received, as counted on all ranks.

Engines count where tokens are sent from, for all slots of the pool, so the counts of all ranks are
added up. A pass never waits: what is taken in a round is added up in the next, and read after it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.engines.lockstep import Lockstep, Pending
from equipoise.planning.layout import Layout

ENDED_KEPT = 3
"""Ended generations whose loads are still reported. Their last counts are added up two rounds after
the switch, and a reporter may find several switches since its latest report."""


_log = logging.getLogger(__name__)


class SeatLoad(NamedTuple):
    """The assignments that this rank's slots received in one generation."""

    generation: int
    slot_load_LS: npt.NDArray[np.int64]


class _Taken(NamedTuple):
    """Counts of this rank that are not added up over the ranks yet."""

    generation: int
    passes: int
    load_LP: Tensor
    """On the host, once `copied` has happened."""
    copied: torch.Event | None


class SeatLoads:
    """One rank's counters; `latest` is for any thread, the rest for the engine's."""

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int,
        rows: Sequence[int],
        on_failure: Callable[[str], None],
    ) -> None:
        """`rows` are those of the layout's layers in what the engine counts.

        `on_failure` is called, with the reason, if a pass cannot be counted.
        """
        self._rank = rank
        self._on_failure = on_failure
        self._own = layout.own_slots(rank)
        self._num_layers = layout.num_layers
        self._rows = torch.tensor(list(rows))
        # Shaped as the engine's table once it counts, so that nothing is selected in each pass.
        # In its type too: a conversion would be half the cost of a pass. Counts are taken every few
        # passes, long before 32 bits are full.
        self._counted = torch.zeros(max(rows) + 1, layout.num_slots, dtype=torch.int32)
        self._is_shaped = False
        self._generation = 0
        self._taken: deque[_Taken] = deque()
        self._sum: tuple[_Taken, Pending] | None = None
        self._lock = threading.Lock()
        self._passes = 0
        self._loads: tuple[SeatLoad, ...] = ()

    @property
    def latest(self) -> tuple[int, tuple[SeatLoad, ...]]:
        """Passes until the latest sum; loads of the current generation, then of ended ones."""
        with self._lock:
            return self._passes, self._loads

    def begin(self, generation: int) -> None:
        """Count for another generation from here on."""
        self._counted.zero_()
        self._generation = generation
        shape = (self._num_layers, self._own.stop - self._own.start)
        with self._lock:
            none = SeatLoad(generation, np.zeros(shape, dtype=np.int64))
            self._loads = (none, *self._loads[:ENDED_KEPT])

    def add(self, counted: Tensor) -> None:
        """Count a pass: integers [rows, slots] of the engine's table, on any device."""
        try:
            if not self._is_shaped:
                self._is_shaped, self._rows = True, self._rows.to(counted.device)
                self._counted = torch.zeros_like(counted)
            self._counted += counted
        except Exception as error:  # noqa: BLE001 - the engine serves on
            self._fail(error)

    def take(self, passes: int) -> None:
        """Set aside what was counted until now, to be added up; no copy is waited for."""
        try:
            self._taken.append(self._take(passes))
        except Exception as error:  # noqa: BLE001 - the engine serves on
            self._fail(error)

    def _take(self, passes: int) -> _Taken:
        copied, device = None, self._counted.device
        load_LP = self._counted.index_select(0, self._rows).to(torch.int64)
        if device.type != "cpu":
            on_device = load_LP
            load_LP = torch.empty_like(on_device, device="cpu", pin_memory=True)
            load_LP.copy_(on_device, non_blocking=True)
            copied = torch.get_device_module(device).Event()
            copied.record()
        self._counted.zero_()
        return _Taken(self._generation, passes, load_LP, copied)

    def _fail(self, error: Exception) -> None:
        _log.error("cannot count this rank's loads", exc_info=error)
        self._on_failure(f"rank {self._rank} cannot count its loads: {error}")

    def begin_sum(self, lockstep: Lockstep) -> None:
        """Start adding up what was taken in an earlier round, if anything was."""
        if not self._taken:
            return
        taken = self._taken.popleft()
        if taken.copied is not None:
            taken.copied.synchronize()
        self._sum = (taken, lockstep.sum(taken.load_LP))

    def read_sum(self) -> None:
        """Take over the sum that was begun in the previous round, if any.

        Raises:
            LockstepError: a rank did not take part.
        """
        if self._sum is None:
            return
        (taken, pending), self._sum = self._sum, None
        load_LS = pending.result().numpy()[:, self._own]
        with self._lock:
            self._passes = taken.passes
            self._loads = tuple(
                load._replace(slot_load_LS=load.slot_load_LS + load_LS)
                if load.generation == taken.generation
                else load
                for load in self._loads
            )

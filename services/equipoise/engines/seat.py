"""`EngineSeat`: a rank of a pool inside an engine that steps by itself.

The engine calls `on_step` after each forward pass, idle passes too, on all ranks alike. Every few
passes the ranks exchange headers (`equipoise.rank.header`) and act on those of the round before, so
that no pass waits for an exchange. All ranks see the same headers, hence all switch after the same
pass or none does, and all stop balancing together.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.engines.comparison import compare, held_row
from equipoise.engines.loads import SeatLoads
from equipoise.engines.lockstep import Lockstep, LockstepError, Pending
from equipoise.engines.slots import EngineSlots
from equipoise.planning.arrays import Checksums
from equipoise.planning.layout import Layout
from equipoise.planning.topology import ModelShape
from equipoise.rank.engine import EngineProgress
from equipoise.rank.errors import GroupError
from equipoise.rank.header import (
    HEADER_WIDTH,
    StepHeader,
    agreed_generation,
    check_group,
    digest_word,
    staged_conflict,
)
from equipoise.rank.held import HeldExperts, StagedGeneration
from equipoise.wire.messages import LayoutRejected, RankStats, Switched

_log = logging.getLogger(__name__)

ROUND_PASSES = 4
"""Forward passes between two exchanges of headers."""

LOAD_ROUNDS = 8
"""Rounds between two sums of the loads of all ranks."""

_MEDIAN_PASSES = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineModel:
    """What a plugin knows of the model in its engine."""

    engine: str
    """Name and version of the engine, for display."""

    shape: ModelShape
    """Shape of the model."""

    expert_of_slot: npt.NDArray[np.int32]
    """The layout that the engine started with, [layers, slots]."""

    slots: Sequence[EngineSlots]
    """This rank's slots, by MoE layer."""

    tables: Callable[[Layout], Any]
    """Makes the engine's tables of a layout, on any thread. Raises StageRejectedError if the engine
    cannot serve it; whatever may fail, fails here."""

    commit: Callable[[Any], None]
    """Puts tables in force between two passes, by copies that cannot fail."""


class _Row(NamedTuple):
    """What a rank sends in a round, beside its header."""

    is_hashed: int
    """1 once the rank has hashed its slots."""
    clock_s: int
    """Unix seconds at the seat's start; those of rank 0 number the epoch."""


class EngineSeat:
    """One rank's part in the agreement; `on_step` is for the engine's thread, the rest for any.

    The clock numbers the epoch and the first generation, so that no restart reuses a number.
    """

    def __init__(
        self,
        model: EngineModel,
        lockstep: Lockstep,
        *,
        worker: str,
        on_ready: Callable[["EngineSeat"], None],
        round_passes: int = ROUND_PASSES,
        load_rounds: int = LOAD_ROUNDS,
    ) -> None:
        """`worker` is the name of this rank's worker, ASCII.

        `on_ready` is called once, on the engine's thread, when all ranks hold verified experts.
        """
        self.model = model
        self.rank = lockstep.rank
        self.num_ranks = lockstep.num_ranks
        self.on_switch: Callable[[Switched], None] = lambda _switched: None
        """Called on the engine's thread after each switch; must not block."""
        self.on_reject: Callable[[LayoutRejected], None] = lambda _rejected: None
        """Called on the engine's thread if the ranks cannot switch to what they staged."""
        self.on_stop: Callable[[str], None] = lambda _reason: None
        """Called on the engine's thread, with the reason, when balancing ends for good."""
        self.epoch = 0
        """The epoch; 0 until the ranks have met."""
        self.stopped = ""
        """Why this seat no longer takes part; empty while it does."""
        self._lockstep = lockstep
        self.worker = worker
        """The name of this rank's worker."""
        self.workers = tuple(f"rank {rank}" for rank in range(self.num_ranks))
        """The workers of all ranks, once the seat is ready."""
        self._on_ready = on_ready
        self._round_passes = round_passes
        self._load_rounds = load_rounds
        self._clock_s = int(time.time())
        self._layout = _first_layout(model, num_ranks=self.num_ranks, generation=0)
        self._held: HeldExperts[Any] | None = None
        self._first_tables: Any = None
        self._table: Checksums | None = None
        # Guards what both the engine and other threads touch; held for microseconds.
        self._lock = threading.Lock()
        self._staged: StagedGeneration[Any] | None = None
        # What the header in flight advertises: not to be dropped before that round is over.
        self._advertised: StagedGeneration[Any] | None = None
        self._leaving = ""
        self._passes = 0
        self._rounds = 0
        self._headers: Pending | None = None
        self._checksums: Pending | None = None
        self._loads = SeatLoads(self._layout, rank=self.rank)
        self._recent_us: deque[int] = deque(maxlen=_MEDIAN_PASSES)
        self._last_s = time.perf_counter()

    # For any thread.

    @property
    def is_ready(self) -> bool:
        """Whether all ranks hold verified experts."""
        return self._table is not None

    @property
    def held(self) -> HeldExperts[Any]:
        """The experts of this rank; only once the seat is ready."""
        assert self._held is not None, "the slots are not hashed yet"
        return self._held

    @property
    def table(self) -> Checksums:
        """Checksums of all experts, uint8 [layers, experts, 16]; only once the seat is ready."""
        assert self._table is not None, "the ranks have not compared their slots yet"
        return self._table

    @property
    def generation(self) -> int:
        """Generation in use."""
        return self.held.contents.layout.generation

    @property
    def staged_generation(self) -> int:
        """Generation that is ready for the switch; 0 if there is none."""
        staged = self._staged
        return staged.generation if staged else 0

    def offer(self, staged: StagedGeneration[Any]) -> bool:
        """Make a generation ready for the switch, in place of any other.

        Returns False, and changes nothing, if the ranks have left its base generation.
        """
        staged.contents.layout.digest()  # Computed here, so that no pass waits for it.
        with self._lock:
            if staged.base_generation != self.generation:
                return False
            self._staged = staged
        return True

    def drop(self, generation: int) -> None:
        """Forget the staged generation, if it has this number.

        A switch whose headers are in flight still happens: the other ranks make it.
        """
        with self._lock:
            if self.staged_generation == generation:
                self._staged = None

    def leave(self, reason: str) -> None:
        """Stop balancing, on all ranks together; the engine serves on in the present layout."""
        with self._lock:
            self._leaving = self._leaving or reason

    def progress(self) -> EngineProgress:
        """Return counters for a report, as added up over all ranks the last time."""
        passes, loads = self._loads.latest
        with self._lock:
            stats = RankStats(
                steps=passes,
                tokens_processed=0,
                tokens_generated=0,
                median_step_us=self._median_us(),
                active_requests=0,
                queued_requests=0,
            )
            return EngineProgress(loads=loads, stats=stats)

    # For the engine's thread.

    def on_step(self, load_LP: Tensor | None) -> None:
        """Take part in what follows a pass; `load_LP` is what this rank counted in it, by slot.

        Integers [layers, slots] of the pool, on any device; None for a pass that does not count.

        Raises:
            LockstepError: this rank advertised a generation and cannot know whether the others
                switch to it. To serve on could give wrong tokens.
        """
        if self.stopped:
            return
        now_s = time.perf_counter()
        self._recent_us.append(round((now_s - self._last_s) * 1e6))
        self._last_s = now_s
        if load_LP is not None:
            self._loads.add(load_LP)
        self._passes += 1
        if self._passes % self._round_passes:
            return
        try:
            self._round()
        except LockstepError as error:
            if self._advertised is not None:
                raise
            self._stop(str(error))
        except GroupError as error:
            self._stop(str(error))

    def _round(self) -> None:
        """Act on the previous round's exchanges, then start this round's."""
        self._rounds += 1
        rows: list[list[int]] = []
        if self._headers is not None:
            rows = self._headers.result().tolist()
            self._loads.read_sum()
            self._read_checksums()
        self._loads.begin_sum(self._lockstep)
        if rows:
            headers = tuple(StepHeader(*row[:HEADER_WIDTH]) for row in rows)
            check_group(headers, names=self.workers)
            self._act(headers, [_Row(*row[HEADER_WIDTH:]) for row in rows])
        if self._table is not None and self._rounds % self._load_rounds == 0:
            self._loads.take(self._passes)
        self._headers = self._lockstep.gather(self._header())

    def _act(self, headers: tuple[StepHeader, ...], rows: Sequence[_Row]) -> None:
        staged, self._advertised = self._advertised, None
        if not self.epoch:
            self._begin(rows[0].clock_s)
        elif self._table is None:
            if self._checksums is None and all(row.is_hashed for row in rows):
                row = held_row(self.worker, self.held.contents.checksums)
                self._checksums = self._lockstep.gather(row)
        elif staged is not None:
            if agreed_generation(headers) is not None:
                self._switch(staged)
            elif reason := staged_conflict(headers, names=self.workers):
                self._reject(staged, reason)

    def _header(self) -> Tensor:
        with self._lock:
            staged, leaving = self._staged, self._leaving
        self._advertised = staged
        layout = self._held.contents.layout if self._held is not None else self._layout
        header = StepHeader(
            epoch=self.epoch,
            step=self._passes,
            num_tokens=0,
            generation=layout.generation if self._table is not None else 0,
            staged_generation=staged.generation if staged else 0,
            leaving=int(bool(leaving)),
            peers_digest=0,
            layout_digest=digest_word(layout.digest()),
            staged_digest=digest_word(staged.contents.layout.digest()) if staged else 0,
        )
        row = _Row(is_hashed=int(self._held is not None), clock_s=self._clock_s)
        return torch.tensor([*header, *row], dtype=torch.int64)

    def _begin(self, clock_s: int) -> None:
        """The ranks have met: take the epoch's number, and hash the slots in the background."""
        self.epoch = clock_s
        self._layout = _first_layout(self.model, num_ranks=self.num_ranks, generation=clock_s)
        threading.Thread(target=self._hash, name="equipoise-hash", daemon=True).start()

    def _hash(self) -> None:
        try:
            self._first_tables = self.model.tables(self._layout)
            self._held = HeldExperts(
                self.model.slots, layout=self._layout, rank=self.rank, tables=self.model.tables
            )
        except Exception as error:  # noqa: BLE001 - the engine serves on
            _log.exception("cannot read this rank's experts")
            self.leave(f"rank {self.rank} cannot read its experts: {error}")

    def _read_checksums(self) -> None:
        """Compare what the ranks hold; every rank finds the same."""
        if self._checksums is None or self._table is not None:
            return
        self.workers, self._table = compare(self._checksums.result(), self._layout)
        # Some engines start with tables that differ by rank.
        self.model.commit(self._first_tables)
        self._loads.begin(self._layout.generation)
        self._on_ready(self)

    def _switch(self, staged: StagedGeneration[Any]) -> None:
        """Use a staged generation from the coming pass on."""
        self._loads.take(self._passes)
        began_s = time.perf_counter()
        self.held.switch(staged)
        self.model.commit(staged.tables)
        stall_us = round((time.perf_counter() - began_s) * 1e6)
        with self._lock:
            # Whatever is staged by now starts from the generation that has just ended.
            self._staged = None
            median_us = self._median_us()
        self._loads.begin(staged.generation)
        self.on_switch(
            Switched(
                epoch=self.epoch,
                rank=self.rank,
                generation=staged.generation,
                checksums=staged.contents.checksums,
                layout_digest=staged.contents.layout.digest(),
                step=self._passes + 1,
                stall_us=stall_us,
                median_step_us=median_us,
            )
        )

    def _reject(self, staged: StagedGeneration[Any], reason: str) -> None:
        with self._lock:
            if self._staged is staged:
                self._staged = None
        self.on_reject(
            LayoutRejected(
                epoch=self.epoch, rank=self.rank, generation=staged.generation, reason=reason
            )
        )

    def _stop(self, reason: str) -> None:
        self.stopped = self._leaving or reason
        self._staged = self._advertised = None
        _log.error(
            "this engine is no longer balanced, and serves on in its present layout: %s",
            self.stopped,
        )
        self.on_stop(self.stopped)

    def _median_us(self) -> int:
        return round(median(self._recent_us)) if self._recent_us else 0


def _first_layout(model: EngineModel, *, num_ranks: int, generation: int) -> Layout:
    return Layout(
        generation=generation or 1,
        num_experts=model.shape.num_experts,
        num_ranks=num_ranks,
        expert_of_slot=model.expert_of_slot,
    )

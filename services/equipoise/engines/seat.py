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
from statistics import median
from typing import Any

from torch import Tensor

from equipoise.engines.baseline import FIRST_PAUSE_S, Baseline, WeightsRow
from equipoise.engines.comparison import HEAD_BYTES
from equipoise.engines.loads import SeatLoads
from equipoise.engines.lockstep import (
    Lockstep,
    LockstepError,
    MixedLayoutsError,
    Pending,
    RowForm,
)
from equipoise.engines.model import EngineModel
from equipoise.planning.arrays import Checksums
from equipoise.planning.layout import Layout
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

LOAD_ROUNDS = 2
"""Rounds between two sums of the loads of all ranks. More would leave slow engines windows without
any; a sum for each round would never catch up with that of a switch."""

_MEDIAN_PASSES = 128

_FIELDS = (*StepHeader._fields, *WeightsRow._fields)
_FORM = RowForm(_FIELDS, HEAD_BYTES, ROUND_PASSES, LOAD_ROUNDS)


class EngineSeat:
    """One rank's part in the agreement.

    `count`, `on_step`, `note_update`, `note_release` and `note_restore` are for the engine's
    thread, the rest for any.
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
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`worker` is the name of this rank's worker, ASCII.

        `on_ready` is called once, on the engine's thread, when all ranks hold verified experts.
        """
        self.model = model
        self.rank = lockstep.rank
        self.num_ranks = lockstep.num_ranks
        self.on_baseline: Callable[[], None] = lambda: None
        """Called on the engine's thread when an epoch begins because the weights were updated."""
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
        layout = Layout(
            generation=1,
            num_experts=model.shape.num_experts,
            num_ranks=self.num_ranks,
            expert_of_slot=model.expert_of_slot,
        )
        self._first_digest = digest_word(layout.digest())
        self._baseline = Baseline(
            model.slots,
            layout=layout,
            rank=self.rank,
            worker=worker,
            tables=model.tables,
            on_failure=self.leave,
            first_pause_s=first_pause_s,
        )
        # Guards what both the engine and other threads touch; held for microseconds.
        self._lock = threading.Lock()
        self._staged: StagedGeneration[Any] | None = None
        # What the header in flight advertises: not to be dropped before that round is over.
        self._advertised: StagedGeneration[Any] | None = None
        self._leaving = ""
        self._passes = 0
        self._rounds = 0
        self._headers: Pending | None = None
        self._loads = SeatLoads(
            layout, rank=self.rank, rows=model.counted_rows, on_failure=self.leave
        )
        self._recent_us: deque[int] = deque(maxlen=_MEDIAN_PASSES)
        self._last_s = time.perf_counter()

    # For any thread.

    @property
    def is_ready(self) -> bool:
        """Whether all ranks hold verified experts."""
        return self._baseline.taken > 0

    @property
    def held(self) -> HeldExperts[Any]:
        """The experts of this rank; only once the seat is ready."""
        assert self._baseline.held is not None, "the slots are not hashed yet"
        return self._baseline.held

    @property
    def table(self) -> Checksums:
        """Checksums of all experts, uint8 [layers, experts, 16]; only once the seat is ready."""
        assert self._baseline.table is not None, "the ranks have not compared their slots yet"
        return self._baseline.table

    @property
    def weights_version(self) -> int:
        """Number of the weights in the slots; above `hashed_weights` until they are hashed."""
        return self._baseline.version

    @property
    def hashed_weights(self) -> int:
        """Number of the weights that `table` is of."""
        return self._baseline.taken

    @property
    def idle_s(self) -> float:
        """Seconds since the engine's latest pass."""
        return time.perf_counter() - self._last_s

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

        Returns False, and changes nothing, if the ranks have left its base generation, or the
        weights have been updated.
        """
        staged.contents.layout.digest()  # Computed here, so that no pass waits for it.
        with self._lock:
            if staged.base_generation != self.generation or not self._baseline.is_valid:
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

    def note_number(self, number: int) -> None:
        """The balancer has used this number, for an epoch or a generation that may end unused."""
        self._baseline.note_number(number)

    def note_changed_slots(self) -> None:
        """Slots hold other bytes than they were filled with: hash all, on all ranks."""
        self._baseline.note_update(is_announced=False)

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

    def count(self, counted: Tensor) -> None:
        """Count what this rank routed in the pass that ends, before `on_step`.

        Integers [rows, slots] of the engine's own table, on any device.
        """
        if not self.stopped:
            self._loads.add(counted)

    def on_step(self) -> None:
        """Take part in what follows a pass.

        Raises:
            LockstepError: this rank advertised a generation and cannot know whether the others
                switch to it, or the ranks use different layouts. To serve on could give wrong
                tokens.
        """
        if self.stopped:
            return
        now_s = time.perf_counter()
        self._recent_us.append(round((now_s - self._last_s) * 1e6))
        self._last_s = now_s
        self._passes += 1
        if self._passes % self._round_passes:
            return
        try:
            self._round()
        except LockstepError as error:
            if self._advertised is not None or isinstance(error, MixedLayoutsError):
                raise
            self._stop(str(error))
        except GroupError as error:
            self._stop(str(error))

    def note_update(self) -> None:
        """The engine has updated its weights, on all ranks between the same two passes.

        What was staged has the old weights, so no rank switches to it, advertised or not.
        """
        with self._lock:
            self._staged = self._advertised = None
        for slots in self.model.slots:
            slots.note_written()
        self._baseline.note_update(is_announced=True)

    def note_release(self, tags: Sequence[str] | None = None) -> None:
        """The engine is about to release memory (sleep mode): that of its `tags`, by default all.

        If its weights are among it, waits for reads in progress; until `note_restore` there are no
        others.
        """
        if not _has_weights(tags):
            return
        _log.info("the engine sleeps: nothing is read or moved until its weights are back")
        with self._lock:
            self._staged = self._advertised = None
        for slots in self.model.slots:
            slots.close()

    def note_restore(self, tags: Sequence[str] | None = None) -> None:
        """The memory is back, at the same addresses; weights in it count as an update."""
        if not _has_weights(tags):
            return
        for slots in self.model.slots:
            slots.open()
        self.note_update()

    def _round(self) -> None:
        """Act on the previous round's exchanges, then start this round's."""
        self._rounds += 1
        rows: list[list[int]] = []
        if self._headers is not None:
            found = self._headers.result()
            rows = _FORM.unpack(found, count=len(_FIELDS), names=self.workers)
            self._loads.read_sum()
            self._begin_epoch()
        self._loads.begin_sum(self._lockstep)
        if rows:
            headers = tuple(StepHeader(*row[:HEADER_WIDTH]) for row in rows)
            self._check(headers)
            self._act(headers)
            weights = [WeightsRow(*row[HEADER_WIDTH:]) for row in rows]
            self._baseline.act(weights, self._lockstep)
        if self.is_ready and self._rounds % self._load_rounds == 0:
            self._loads.take(self._passes)
        self._headers = self._lockstep.gather(self._header())

    def _check(self, headers: tuple[StepHeader, ...]) -> None:
        left = [name for name, one in zip(self.workers, headers, strict=True) if one.leaving]
        if left:
            raise GroupError(f"stopped by {', '.join(left)}: the log there has the reason")
        try:
            check_group(headers, names=self.workers)
        except GroupError as error:
            if len({header.layout_digest for header in headers}) > 1:
                raise MixedLayoutsError(str(error)) from error
            raise

    def _act(self, headers: tuple[StepHeader, ...]) -> None:
        staged, self._advertised = self._advertised, None
        if staged is None:
            return
        if agreed_generation(headers) is not None:
            self._switch(staged)
        elif reason := staged_conflict(headers, names=self.workers):
            self._reject(staged, reason)

    def _header(self) -> Tensor:
        with self._lock:
            staged = self._staged if self._baseline.is_valid else None
            self._staged, leaving = staged, self._leaving
        self._advertised = staged
        layout = self.held.contents.layout if self.is_ready else None
        header = StepHeader(
            epoch=self.epoch,
            step=self._passes,
            num_tokens=0,
            num_drafts=0,
            generation=layout.generation if layout else 0,
            staged_generation=staged.generation if staged else 0,
            leaving=int(bool(leaving)),
            peers_digest=0,
            layout_digest=digest_word(layout.digest()) if layout else self._first_digest,
            staged_digest=digest_word(staged.contents.layout.digest()) if staged else 0,
        )
        return _FORM.pack([*header, *self._baseline.row()])

    def _begin_epoch(self) -> None:
        """Begin an epoch if the ranks have agreed on a baseline; every rank does in this round."""
        agreed = self._baseline.read()
        if agreed is None:
            return
        if not agreed.is_first:
            self._loads.take(self._passes)
        self.workers, self.epoch = agreed.workers, agreed.number
        self._loads.begin(agreed.number)
        if agreed.is_first:
            # Some engines start with tables that differ by rank.
            self.model.commit(self._baseline.first_tables)
            self._on_ready(self)
        else:
            self.on_baseline()

    def _switch(self, staged: StagedGeneration[Any]) -> None:
        """Use a staged generation from the coming pass on."""
        self._loads.take(self._passes)
        before, began_s = self.held.contents.layout, time.perf_counter()
        self.held.switch(staged)
        self.model.commit(staged.tables)
        stall_us = round((time.perf_counter() - began_s) * 1e6)
        with self._lock:
            # Whatever is staged by now starts from the generation that has just ended.
            self._staged = None
            median_us = self._median_us()
        self._baseline.note_switch(before, staged.contents.layout)
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


def _has_weights(tags: Sequence[str] | None) -> bool:
    return not tags or "weights" in tags

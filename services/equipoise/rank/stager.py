"""`Stager`: turns the balancer's Stage into a generation that the engine can switch to.

It checks, pulls and builds in staging memory; slots and the engine's thread stay untouched. At most
one generation is being prepared or staged at a time, and the balancer's latest message wins.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from equipoise.planning.layout import Layout, is_moved
from equipoise.rank.engine import SwitchingEngine
from equipoise.rank.errors import StageRejectedError, TransferError
from equipoise.rank.held import (
    NO_CHECKSUM,
    Contents,
    HeldExperts,
    StagedGeneration,
    emptied,
)
from equipoise.rank.transfer import ExpertPuller, PullResult
from equipoise.wire.balancer_messages import Abort, Stage
from equipoise.wire.messages import LayoutRejected, Staged
from equipoise_model.experts import PayloadError

_log = logging.getLogger(__name__)


class StageSpans(Protocol):
    """Records the staging of generations, for traces."""

    def staging(
        self, stage: Stage
    ) -> AbstractContextManager[Callable[[Staged | LayoutRejected], None]]:
        """Record the staging of a generation; call the result with the answer."""


class Stager:
    """Stages generations for one rank of an epoch; used from the event loop only."""

    def __init__(
        self,
        *,
        engine: SwitchingEngine,
        held: HeldExperts[Any],
        puller: ExpertPuller,
        epoch: int,
        send: Callable[[Staged | LayoutRejected], object],
        spans: StageSpans,
        num_places: int = 0,
    ) -> None:
        """`num_places` are the experts that the rank has room for over all layers; 0 for any."""
        self._num_places = num_places
        self._engine = engine
        self._held = held
        self._puller = puller
        self._epoch = epoch
        self._send = send
        self._spans = spans
        # The layout that is being prepared or is staged, and the task that prepares it.
        self._layout: Layout | None = None
        self._task: asyncio.Task[None] | None = None
        self._staged: Staged | None = None

    def stage(self, stage: Stage) -> None:
        """Start preparing a generation; the answer follows.

        A repeated Stage is answered again; any other replaces the previous one. The number alone
        identifies nothing: a balancer that lost its store may use it again.
        """
        if self._is_current(stage.layout):
            if (
                self._staged is not None
                and self._engine.staged_generation == stage.layout.generation
            ):
                self._send(self._staged)
                return
            if self._task is not None and not self._task.done():
                return
        self._discard()
        self._layout = stage.layout
        self._task = asyncio.create_task(self._prepare_and_answer(stage))

    def abort(self, abort: Abort) -> None:
        """Drop a generation that is being prepared or staged, unless already switched to."""
        layout = self._layout
        if abort.epoch == self._epoch and layout and layout.generation == abort.generation:
            self._discard()

    def reject(self, rejected: LayoutRejected) -> None:
        """Report that the ranks cannot switch to what this one staged; the engine dropped it."""
        if self._layout is not None and self._layout.generation == rejected.generation:
            self._discard()
        _log.warning("generation %d is rejected: %s", rejected.generation, rejected.reason)
        self._send(rejected)

    def drop_unfinished(self) -> None:
        """Drop a generation that is not staged yet, so that a Hello that omits it stays true."""
        if not self._engine.staged_generation:
            self._discard()

    async def close(self) -> None:
        """Stop preparing."""
        task = self._task
        self._discard()
        if task is not None:
            await asyncio.wait([task])

    def _is_current(self, layout: Layout) -> bool:
        """Whether this layout is being prepared or staged: the same table, not just its number."""
        current = self._layout
        return (
            current is not None
            and current.generation == layout.generation
            and current.same_placement(layout)
        )

    def _discard(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._layout is not None:
            self._engine.drop(self._layout.generation)
        self._layout, self._task, self._staged = None, None, None

    async def _prepare_and_answer(self, stage: Stage) -> None:
        generation = stage.layout.generation
        with self._spans.staging(stage) as record:
            answer: Staged | LayoutRejected
            try:
                answer = self._staged = await self._prepare(stage)
                _log.info("generation %d is staged: %d moves", generation, len(stage.moves))
            except (StageRejectedError, TransferError, PayloadError) as error:
                answer = self._rejected(generation, str(error))
            except Exception as error:  # noqa: BLE001 - the other ranks must not wait for a timeout
                _log.exception("generation %d cannot be staged", generation)
                kind = type(error).__name__
                answer = self._rejected(generation, f"this rank cannot stage it: {kind}: {error}")
            self._send(answer)
            record(answer)

    def _rejected(self, generation: int, reason: str) -> LayoutRejected:
        _log.warning("generation %d is rejected: %s", generation, reason)
        return LayoutRejected(
            epoch=self._epoch, rank=self._held.rank, generation=generation, reason=reason
        )

    async def _prepare(self, stage: Stage) -> Staged:
        """Stage a generation, within the Stage's timeout."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(stage.timeout_s):
                pulled = await self._pull_and_offer(stage)
        except TimeoutError as error:
            raise StageRejectedError(
                f"staging took longer than the allowed {stage.timeout_s:g} s"
            ) from error
        return Staged(
            epoch=self._epoch,
            rank=self._held.rank,
            generation=stage.layout.generation,
            peer_bytes=pulled.peer_bytes,
            checkpoint_bytes=pulled.checkpoint_bytes,
            duration_us=round((time.perf_counter() - began) * 1e6),
            layout_digest=stage.layout.digest(),
        )

    async def _pull_and_offer(self, stage: Stage) -> PullResult:
        base = self._held.contents
        check_stage(stage, running=base.layout, epoch=self._epoch, rank=self._held.rank)
        check_places(stage.layout, rank=self._held.rank, num_places=self._num_places)
        pulled = await self._puller.pull(stage.moves)
        try:
            staged = await asyncio.to_thread(self._build, stage, pulled, base)
        except torch.OutOfMemoryError as error:
            raise StageRejectedError(
                f"not enough device memory to stage {len(stage.moves)} experts: lower "
                "waves.maxBytes in the policy"
            ) from error
        # Nothing is awaited between here and the answer: an abort finds the generation offered
        # or not.
        if not self._engine.offer(staged):
            now, base_generation = self._engine.generation, stage.base_generation
            if now == base_generation:
                raise StageRejectedError("its weights were updated while it staged: plan again")
            raise StageRejectedError(
                f"the ranks switched from generation {base_generation} to {now} in the meantime: "
                "plan from there"
            )
        return pulled

    def _build(self, stage: Stage, pulled: PullResult, base: Contents) -> StagedGeneration[Any]:
        first = stage.layout.own_slots(self._held.rank).start
        indices = [(move.layer, move.slot - first) for move in stage.moves]
        checksums = dict.fromkeys(
            emptied(base.layout, stage.layout, rank=self._held.rank), NO_CHECKSUM
        )
        checksums |= dict(zip(indices, [move.checksum for move in stage.moves], strict=True))
        return self._held.prepare(
            base,
            base.changed(stage.layout, checksums),
            dict(zip(indices, pulled.payloads, strict=True)),
        )


def check_stage(stage: Stage, *, running: Layout, epoch: int, rank: int) -> None:
    """Check that a Stage follows from the running layout and moves exactly this rank's changes.

    `wire` has already checked each move against the Stage's own layout.

    Raises:
        StageRejectedError: the Stage does not fit; the message names the remedy.
    """
    layout = stage.layout
    if stage.epoch != epoch:
        raise StageRejectedError(f"this rank serves in epoch {epoch}, not {stage.epoch}")
    if stage.base_generation != running.generation:
        raise StageRejectedError(
            f"this rank runs generation {running.generation}, not {stage.base_generation}: "
            "plan from there"
        )
    if layout.generation <= running.generation:
        raise StageRejectedError(
            f"generation {layout.generation} is not newer than the running {running.generation}"
        )
    if _shape(layout) != _shape(running):
        raise StageRejectedError(
            f"a layout of (layers, slots, experts, ranks) = {_shape(layout)} does not fit "
            f"this pool's {_shape(running)}"
        )
    own = running.own_slots(rank)
    changed = np.argwhere(is_moved(running.expert_of_slot[:, own], layout.expert_of_slot[:, own]))
    needed = {(int(layer), int(slot) + own.start) for layer, slot in changed}
    moved = {(move.layer, move.slot) for move in stage.moves}
    for layer, slot in sorted(needed ^ moved):
        reason = "has no move" if (layer, slot) in needed else "is not this rank's or is unchanged"
        raise StageRejectedError(f"layer {layer}, slot {slot} {reason}: plan again")


def check_places(layout: Layout, *, rank: int, num_places: int) -> None:
    """Check that a rank has a place for each expert that a layout gives it; 0 for any number.

    Raises:
        StageRejectedError: it has not.
    """
    used = layout.used_places[rank]
    if 0 < num_places < used:
        raise StageRejectedError(
            f"rank {rank} would hold {used} experts, but has {num_places} places: plan again"
        )


def _shape(layout: Layout) -> tuple[int, int, int, int]:
    return (layout.num_layers, layout.num_slots, layout.num_experts, layout.num_ranks)

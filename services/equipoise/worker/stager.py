"""`Stager`: from the balancer's Stage to a generation that the engine can switch to.

Checks, pulls, builds; never touches a slot or the serving thread. At most one generation is being
prepared or waits at a time, and the balancer's last word counts.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import Checksums
from equipoise.planning.layout import Layout
from equipoise.planning.moves import Move
from equipoise.wire.messages import Abort, Refused, Stage, Staged
from equipoise.worker.engine import Engine
from equipoise.worker.errors import StageRefusedError, TransferError
from equipoise.worker.held import Contents, HeldExperts, StagedGeneration, own_slots
from equipoise.worker.spans import RankSpans
from equipoise.worker.transfer import ExpertPuller, Pulled
from equipoise_model.experts import PayloadError, PhysicalSlots, StagedExperts
from equipoise_model.placement import PlacementTables

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preparation:
    """A stage under way or done."""

    layout: Layout
    task: asyncio.Task[None]

    @property
    def generation(self) -> int:
        """Generation being prepared."""
        return self.layout.generation

    def is_for(self, layout: Layout) -> bool:
        """Whether this prepares the very same layout, not just the same number."""
        return self.layout.same_placement(layout) and self.generation == layout.generation


class Stager:
    """Prepares generations for one rank of an epoch; used from the event loop only.

    `answer` takes what the balancer is to be told; it is called on the event loop.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        held: HeldExperts,
        puller: ExpertPuller,
        slots: list[PhysicalSlots],
        epoch: int,
        rank: int,
        answer: Callable[[Staged | Refused], None],
        spans: RankSpans | None = None,
    ) -> None:
        self._engine = engine
        self._held = held
        self._puller = puller
        self._slots = slots
        self._epoch = epoch
        self._rank = rank
        self._answer = answer
        self._spans = spans or RankSpans()
        self._preparation: _Preparation | None = None
        self._staged: Staged | None = None

    def stage(self, stage: Stage) -> None:
        """Begin to prepare a generation; the answer follows.

        The same again is answered again; anything else replaces what was before. A number alone
        proves nothing: a balancer whose store was emptied may use one again.
        """
        running = self._preparation
        if running and running.is_for(stage.layout):
            if self._staged is not None and self.waiting == running.generation:
                self._answer(self._staged)
                return
            if not running.task.done():
                return
        self._discard()
        task = asyncio.create_task(self._prepare_and_answer(stage))
        self._preparation = _Preparation(layout=stage.layout, task=task)

    def abort(self, abort: Abort) -> None:
        """Drop a generation that is being prepared or waits, unless it was switched to."""
        running = self._preparation
        if abort.epoch == self._epoch and running and running.generation == abort.generation:
            self._discard()

    def drop_unfinished(self) -> None:
        """Give up what is not staged yet: who is about to be told that nothing is must be right."""
        if self._preparation is not None and not self.waiting:
            self._discard()

    @property
    def waiting(self) -> int:
        """Generation that waits for the switch; 0 if none does."""
        return self._engine.staged_generation

    async def close(self) -> None:
        """Stop preparing."""
        running = self._preparation
        self._discard()
        if running:
            await asyncio.wait([running.task])

    def _discard(self) -> None:
        if self._preparation is not None:
            self._preparation.task.cancel()
            self._engine.drop(self._preparation.generation)
        self._preparation, self._staged = None, None

    async def _prepare_and_answer(self, stage: Stage) -> None:
        with self._spans.staging(stage) as staging:
            answer = await self._prepared(stage)
            if isinstance(answer, Staged):
                staging.done(answer)
            else:
                staging.refused(answer.reason)

    async def _prepared(self, stage: Stage) -> Staged | Refused:
        """Prepare, and tell what came of it; the answer is told already."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(stage.timeout_s):
                pulled = await self._prepare(stage)
        except (StageRefusedError, TransferError, PayloadError) as error:
            return self._refuse(stage, str(error))
        except TimeoutError:
            return self._refuse(
                stage, f"staging took longer than the allowed {stage.timeout_s:g} s"
            )
        staged = self._staged = Staged(
            epoch=self._epoch,
            rank=self._rank,
            generation=stage.layout.generation,
            peer_bytes=pulled.peer_bytes,
            checkpoint_bytes=pulled.checkpoint_bytes,
            duration_us=round((time.perf_counter() - began) * 1e6),
        )
        self._answer(staged)
        _log.info(
            "generation %d is staged: %d moves in %d us",
            stage.layout.generation,
            len(stage.moves),
            staged.duration_us,
        )
        return staged

    def _refuse(self, stage: Stage, reason: str) -> Refused:
        _log.warning("generation %d is refused: %s", stage.layout.generation, reason)
        refused = Refused(
            epoch=self._epoch,
            rank=self._rank,
            generation=stage.layout.generation,
            reason=reason,
        )
        self._answer(refused)
        return refused

    async def _prepare(self, stage: Stage) -> Pulled:
        contents = self._held.contents
        check_stage(stage, running=contents.layout, epoch=self._epoch, rank=self._rank)
        pulled = await self._puller.pull(stage.moves)
        staged = await asyncio.to_thread(self._build, stage, pulled, contents)
        # From here to the caller nothing waits: an abort finds the generation offered or not.
        if not self._engine.offer(staged):
            raise StageRefusedError(
                f"the ranks switched from generation {stage.base_generation} to "
                f"{self._engine.generation} meanwhile: plan from there"
            )
        return pulled

    def _build(self, stage: Stage, pulled: Pulled, contents: Contents) -> StagedGeneration:
        layout = stage.layout
        first = own_slots(layout, rank=self._rank).start
        places = [(move.layer, move.slot - first) for move in stage.moves]
        return StagedGeneration(
            base_generation=stage.base_generation,
            layout=layout,
            placement=placement_of(layout).to(self._slots[0].device),
            experts=StagedExperts.prepare(
                dict(zip(places, pulled.payloads, strict=True)), self._slots
            ),
            checksums=_with_moves(contents.checksums, stage.moves, first=first),
        )


def placement_of(layout: Layout) -> PlacementTables:
    """The tables by which the model dispatches in a layout."""
    return PlacementTables.from_layout(
        layout.expert_of_slot,
        num_experts=layout.num_experts,
        num_ranks=layout.num_ranks,
        generation=layout.generation,
        share_of_slot=layout.share_of_slot,
    )


def check_stage(stage: Stage, *, running: Layout, epoch: int, rank: int) -> None:
    """See that a stage fits what runs, and that its moves are exactly this rank's changes.

    Raises:
        StageRefusedError: it does not; the message says what would.
    """
    layout = stage.layout
    if stage.epoch != epoch:
        raise StageRefusedError(f"this rank serves in epoch {epoch}, not {stage.epoch}")
    if stage.base_generation != running.generation:
        raise StageRefusedError(
            f"this rank runs generation {running.generation}, not {stage.base_generation}: "
            "plan from there"
        )
    if layout.generation <= running.generation:
        raise StageRefusedError(
            f"generation {layout.generation} is not newer than {running.generation}, which runs"
        )
    if _shape(layout) != _shape(running):
        raise StageRefusedError(
            f"a layout of (layers, slots, experts, ranks) = {_shape(layout)} does not fit "
            f"this pool's {_shape(running)}"
        )
    own = own_slots(running, rank=rank)
    changed = np.argwhere(layout.expert_of_slot[:, own] != running.expert_of_slot[:, own])
    needed = {(int(layer), int(slot) + own.start) for layer, slot in changed}
    moved = [(move.layer, move.slot) for move in stage.moves]
    for place in sorted(needed.symmetric_difference(moved)):
        problem = "has no move" if place in needed else "is not this rank's or does not change"
        raise StageRefusedError(f"layer {place[0]}, slot {place[1]} {problem}: plan again")
    if len(moved) != len(needed):
        raise StageRefusedError("two moves fill one slot: plan again")
    for move in stage.moves:
        expert = int(layout.expert_of_slot[move.layer, move.slot])
        if move.expert != expert:
            raise StageRefusedError(
                f"layer {move.layer}, slot {move.slot}: the move brings expert {move.expert}, "
                f"the layout says {expert}"
            )


def _shape(layout: Layout) -> tuple[int, int, int, int]:
    return (layout.num_layers, layout.num_slots, layout.num_experts, layout.num_ranks)


def _with_moves(checksums: Checksums, moves: tuple[Move, ...], *, first: int) -> Checksums:
    changed = checksums.copy()
    for move in moves:
        changed[move.layer, move.slot - first] = np.frombuffer(move.checksum, dtype=np.uint8)
    changed.flags.writeable = False
    return changed

"""Which Stages a rank accepts. Pure."""

import numpy as np

from equipoise.planning.layout import Layout
from equipoise.wire.messages import Stage
from equipoise.worker.errors import StageRefusedError


def check_stage(stage: Stage, *, running: Layout, epoch: int, rank: int) -> None:
    """Check that a Stage follows from the running layout and moves exactly this rank's changes.

    `wire` has already checked each move against the Stage's own layout.

    Raises:
        StageRefusedError: the Stage does not fit; the message names the remedy.
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
            f"generation {layout.generation} is not newer than the running {running.generation}"
        )
    if _shape(layout) != _shape(running):
        raise StageRefusedError(
            f"a layout of (layers, slots, experts, ranks) = {_shape(layout)} does not fit "
            f"this pool's {_shape(running)}"
        )
    own = running.own_slots(rank)
    changed = np.argwhere(layout.expert_of_slot[:, own] != running.expert_of_slot[:, own])
    needed = {(int(layer), int(slot) + own.start) for layer, slot in changed}
    moved = {(move.layer, move.slot) for move in stage.moves}
    for layer, slot in sorted(needed ^ moved):
        reason = "has no move" if (layer, slot) in needed else "is not this rank's or is unchanged"
        raise StageRefusedError(f"layer {layer}, slot {slot} {reason}: plan again")


def _shape(layout: Layout) -> tuple[int, int, int, int]:
    return (layout.num_layers, layout.num_slots, layout.num_experts, layout.num_ranks)

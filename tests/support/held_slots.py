"""The experts of a loaded model, as a rank holds them."""

from equipoise.worker.placement import HeldSlots, placement_of


def held_by(core, layout, *, rank=0):
    """What the slots of a `ModelCore` hold, which `layout` must describe."""
    return HeldSlots(
        core.slots,
        layout=layout,
        rank=rank,
        tables=lambda other: placement_of(other).to(core.device),
    )

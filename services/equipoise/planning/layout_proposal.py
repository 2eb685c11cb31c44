"""`propose_layout`: the waves to a layout that no planner chose, for example an earlier one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.change import LayoutChange
from equipoise.planning.layout import Layout
from equipoise.planning.moves import waves
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutProposal:
    """The waves to a layout, and their cost."""

    waves: Sequence[LayoutChange]
    """Changes from valid layout to valid layout, one generation each; empty if nothing changes."""
    moves: int
    """Slots that change their expert."""
    bytes: int
    """Bytes to copy."""
    balancedness_current: float
    """Of the latest window's load under the current layout; 1.0 without load."""
    balancedness_proposed: float
    """The same under the target layout."""


def propose_layout(
    current: Layout,
    target: Layout,
    *,
    window: Load | None,
    model: ModelShape,
    policy: Policy,
    first_generation: int,
) -> LayoutProposal:
    """Lead from `current` to the placement of `target`, in generations from `first_generation` on.

    The generation of `target` is ignored, because generations are never reused. `window` is the
    latest load, [layers, experts] in assignments, or None; it is only reported, because the caller
    has decided already.
    """
    assert fits(target, current), "layouts of one pool"
    moves = int(np.count_nonzero(current.expert_of_slot != target.expert_of_slot))
    return LayoutProposal(
        waves=waves(
            current,
            current.with_placement(
                target.expert_of_slot,
                generation=first_generation,
                share_of_slot=target.share_of_slot,
            ),
            expert_bytes=model.expert_bytes,
            max_wave_bytes=policy.max_wave_bytes,
        ),
        moves=moves,
        bytes=moves * model.expert_bytes,
        balancedness_current=_balancedness(current, window),
        balancedness_proposed=_balancedness(target, window),
    )


def fits(layout: Layout, other: Layout) -> bool:
    """Whether both are layouts of the same model on ranks of the same sizes."""
    return (
        layout.num_layers == other.num_layers
        and layout.num_experts == other.num_experts
        and layout.slots_of_rank == other.slots_of_rank
    )


def _balancedness(layout: Layout, window: Load | None) -> float:
    if window is None or window.shape != (layout.num_layers, layout.num_experts):
        return 1.0
    return balancedness(layout_loads(layout, window))

"""`propose_layout`: the way to a layout that no planner chose, for example an earlier one."""

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
    """A chain of changes that ends in the layout wanted, and what it changes.

    `waves` lead from valid layout to valid layout, a generation each; there is none if nothing
    moves. `moves`
    counts the slots that change, `bytes` what they cost. Both balancednesses are what the latest
    window's load makes of a layout; 1.0 where there was no load.
    """

    waves: Sequence[LayoutChange]
    moves: int
    bytes: int
    balancedness_current: float
    balancedness_proposed: float


def propose_layout(
    current: Layout,
    target: Layout,
    *,
    window: Load | None,
    model: ModelShape,
    policy: Policy,
    first_generation: int,
) -> LayoutProposal:
    """Place experts as `target` does, from `current`, in generations from `first_generation` on.

    The generation of `target` does not count: numbers are never used again. `window` is the
    latest load, [layers, experts] in assignments, or None if there is none; it judges
    nothing, because somebody has judged already.
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

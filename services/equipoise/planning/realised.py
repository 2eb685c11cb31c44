"""Realised shares: whether slots serve the part of their expert's load that the layout says.

What workers do with a layout is not taken on trust: their counters tell it, window by window.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.layout import Layout
from equipoise.planning.shares import WHOLE

MIN_ASSIGNMENTS = 256.0
"""Assignments that an expert must have in a window: shares of fewer say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealisedShares:
    """One window of one generation, over experts with several replicas and enough assignments.

    `layer`, `slot` and `expert` are where the realised share is farthest from the planned one, both
    from 0 to 1, among `assignments` of that expert. `misplaced` is the part of all these experts'
    assignments that other slots served than planned. `uneven_layers` counts layers whose shares
    are not even.
    """

    generation: int
    layer: int
    slot: int
    expert: int
    planned: float
    realised: float
    assignments: float
    misplaced: float
    uneven_layers: int


def realised_shares(slot_load: Load, layout: Layout) -> RealisedShares | None:
    """Compare `slot_load`, [layers, slots], with the shares of a layout."""
    table, shares = layout.expert_of_slot, layout.share_of_slot
    keys = table + np.arange(layout.num_layers)[:, None] * layout.num_experts
    of_expert = np.bincount(keys.ravel(), weights=slot_load.ravel())[keys]
    replicas = np.take_along_axis(layout.replica_counts(), table, axis=1)
    counts = (replicas > 1) & (of_expert >= MIN_ASSIGNMENTS)
    if not counts.any():
        return None
    planned = 1.0 / replicas if shares is None else shares / WHOLE
    realised = slot_load / np.maximum(of_expert, 1.0)
    off = np.where(counts, np.abs(realised - planned), -1.0)
    layer, slot = (int(index) for index in np.unravel_index(off.argmax(), off.shape))
    return RealisedShares(
        generation=layout.generation,
        layer=layer,
        slot=slot,
        expert=int(table[layer, slot]),
        planned=float(planned[layer, slot]),
        realised=float(realised[layer, slot]),
        assignments=float(of_expert[layer, slot]),
        misplaced=float((off * of_expert)[counts].sum() / 2 / slot_load[counts].sum()),
        uneven_layers=_num_uneven_layers(layout),
    )


def _num_uneven_layers(layout: Layout) -> int:
    if layout.share_of_slot is None:
        return 0
    even = layout.with_placement(layout.expert_of_slot, generation=layout.generation).shares()
    return int((layout.share_of_slot != even).any(axis=1).sum())

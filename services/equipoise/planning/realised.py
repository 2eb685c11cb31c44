"""Realised shares: whether slots serve the planned share of their expert's load.

Workers are not trusted to follow a layout: their counters show it, window by window.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import EMPTY, Load
from equipoise.planning.layout import Layout
from equipoise.planning.shares import WHOLE

MIN_ASSIGNMENTS = 256.0
"""Assignments that an expert needs in a window: with fewer, shares are mostly noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealisedShares:
    """Realised and planned shares in one window of one generation.

    Covers experts with several replicas and at least `MIN_ASSIGNMENTS`.
    """

    generation: int
    """Generation that ran."""
    layer: int
    """MoE layer of the slot whose realised share is farthest from its planned one."""
    slot: int
    """That slot."""
    expert: int
    """The expert in that slot."""
    planned: float
    """Its planned share, 0 to 1."""
    realised: float
    """Its realised share, 0 to 1."""
    assignments: float
    """Assignments to that expert in the window: the sample size."""
    misplaced: float
    """Fraction of all covered assignments that a slot other than planned served."""
    uneven_layers: int
    """Layers whose planned shares are not even."""


def realised_shares(slot_load: Load, layout: Layout) -> RealisedShares | None:
    """Compare `slot_load`, [layers, slots], with a layout's shares; None without enough load."""
    table, shares = np.maximum(layout.expert_of_slot, 0), layout.share_of_slot
    is_used = layout.expert_of_slot != EMPTY
    keys = table + np.arange(layout.num_layers)[:, None] * layout.num_experts
    of_expert = np.bincount(keys.ravel(), weights=slot_load.ravel())[keys]
    replicas = np.take_along_axis(layout.replica_counts(), table, axis=1)
    counts = is_used & (replicas > 1) & (of_expert >= MIN_ASSIGNMENTS)
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
        uneven_layers=int(layout.uneven_layers().sum()),
    )

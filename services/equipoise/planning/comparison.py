"""`compare`: what a change of layout does to the balance of a load. Judges nothing."""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness_per_layer, layout_loads, mean_if_busy
from equipoise.planning.layout import Layout
from equipoise.planning.placing.tally import MOST_SUMMED, sum_each_by_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """How balanced a load is `before` and `after`, under two layouts of the same ranks.

    `gain_of_layer`, [layers], is by how much each layer's balancedness grows.
    """

    before: float
    after: float
    gain_of_layer: Load


def compare(current: Layout, target: Layout, *loads: Load) -> tuple[Comparison, ...]:
    """What each load, [layers, experts] in any unit, gains by going from `current` to `target`."""
    stacked = np.stack(loads, dtype=np.float64)
    rank_load = np.stack([_layout_loads(layout, stacked) for layout in (current, target)], axis=1)
    is_busy = rank_load.max(axis=-1) > 0
    return tuple(
        Comparison(
            before=mean_if_busy(per_layer[0], is_busy=busy[0]),
            after=mean_if_busy(per_layer[1], is_busy=busy[1]),
            gain_of_layer=per_layer[1] - per_layer[0],
        )
        for per_layer, busy in zip(balancedness_per_layer(rank_load), is_busy, strict=True)
    )


def _layout_loads(layout: Layout, loads: Load) -> Load:
    """What `layout_loads` gives for each load, [loads, layers, ranks], and mostly sooner."""
    if layout.share_of_slot is not None or max(layout.slots_of_rank) > MOST_SUMMED:
        return np.stack([layout_loads(layout, load) for load in loads])
    first_slot = np.array(layout.first_slot, dtype=np.int64)
    # Compiled code tells arrays that may be written from those that may not.
    return sum_each_by_rank(np.array(layout.expert_of_slot), loads, first_slot)

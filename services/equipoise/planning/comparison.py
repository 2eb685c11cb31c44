"""`compare`: how a change of layout affects the balance of a load. Decides nothing."""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness_per_layer, layout_loads, mean_if_busy
from equipoise.planning.layout import Layout
from equipoise.planning.placing.tally import split_by_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """How balanced one load is under two layouts of the same ranks."""

    before: float
    """Balancedness under the current layout, averaged over the layers with traffic."""
    after: float
    """Balancedness under the target layout."""
    gain_of_layer: Load
    """Increase of each layer's balancedness, [layers]."""


def compare(current: Layout, target: Layout, *loads: Load) -> tuple[Comparison, ...]:
    """Compare two layouts on each load, [layers, experts] in any unit."""
    return tuple(
        _comparison(before, after)
        for before, after in zip(_loads(current, loads), _loads(target, loads), strict=True)
    )


def _comparison(before: Load, after: Load) -> Comparison:
    old, new = balancedness_per_layer(before), balancedness_per_layer(after)
    is_busy = before.max(axis=-1) > 0
    return Comparison(
        before=mean_if_busy(old, is_busy=is_busy),
        after=mean_if_busy(new, is_busy=is_busy),
        gain_of_layer=new - old,
    )


def _loads(layout: Layout, loads: tuple[Load, ...]) -> list[Load]:
    """`layout_loads` of each load; even splits take the compiled way, which is faster."""
    if layout.share_of_slot is not None:
        return [layout_loads(layout, load) for load in loads]
    rank_of_slot = np.repeat(np.arange(layout.num_ranks), layout.slots_of_rank)
    # A writable copy: compiled code would be compiled again for a read-only array.
    table = np.array(layout.expert_of_slot)
    return [
        split_by_rank(table, np.array(load, dtype=np.float64, order="C"), rank_of_slot)
        for load in loads
    ]

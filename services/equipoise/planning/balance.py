"""How evenly a placement spreads a load over ranks, and how a change of layout affects that."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices, Load, ShareTable, Weights
from equipoise.planning.layout import Layout
from equipoise.planning.placing.tally import split_by_rank
from equipoise.planning.shares import WHOLE


def rank_loads(
    expert_of_slot: ExpertTable,
    *,
    load: Load,
    num_ranks: int,
    first_slot: Sequence[int] | None = None,
    share_of_slot: ShareTable | None = None,
) -> Load:
    """Compute the load of each rank, [layers, ranks].

    The planner's loops over even splits use the compiled `Problem.rank_loads` instead.

    Args:
        expert_of_slot: int32 [layers, slots].
        load: [layers, experts] in any unit.
        num_ranks: the number of ranks.
        first_slot: [ranks + 1], the first slot of each rank and the end; even if None.
        share_of_slot: int32 [layers, slots]; None splits experts evenly over their replicas.
    """
    cells = expert_of_slot + np.arange(len(load))[:, None] * load.shape[1]
    is_empty = expert_of_slot == EMPTY
    cells[is_empty] = 0
    if share_of_slot is None:
        replicas = np.bincount(cells[~is_empty], minlength=load.size)
        slot_load = np.take(load.ravel() / np.maximum(replicas, 1), cells)
    else:
        slot_load = np.take(load, cells) * (share_of_slot / WHOLE)
    slot_load[is_empty] = 0.0
    if first_slot is None:
        per_rank: Load = slot_load.reshape(len(load), num_ranks, -1).sum(axis=2)
        return per_rank
    assert len(first_slot) == num_ranks + 1, "one first slot per rank, and the end"
    return np.add.reduceat(slot_load, first_slot[:-1], axis=1)


def layout_loads(layout: Layout, load: Load) -> Load:
    """Compute the load of each rank under a layout and its shares, [layers, ranks]."""
    return rank_loads(
        layout.expert_of_slot,
        load=load,
        num_ranks=layout.num_ranks,
        first_slot=layout.first_slot,
        share_of_slot=layout.share_of_slot,
    )


def balancedness_per_layer(rank_load: Load) -> Load:
    """Compute mean / max rank load per layer, [..., layers]; 1.0 for a layer without traffic."""
    busiest = rank_load.max(axis=-1)
    idle = busiest <= 0
    per_layer: Load = np.where(idle, 1.0, rank_load.mean(axis=-1) / np.where(idle, 1.0, busiest))
    return per_layer


def balancedness(rank_load: Load) -> float:
    """Compute mean / max rank load, averaged over the layers with traffic.

    1.0 is perfect balance, or no traffic. A step takes about 1 / balancedness times as long as it
    would with evenly loaded ranks.
    """
    return mean_if_busy(balancedness_per_layer(rank_load), is_busy=rank_load.max(axis=1) > 0)


def spread_layers(load: Load, *, most: int) -> Indices:
    """Return at most `most` layers with load, evenly spaced over the model, to stand for all."""
    busy = np.flatnonzero(load.any(axis=1))
    return np.unique(busy[np.linspace(0, len(busy) - 1, most).round().astype(int)])


def mean_if_busy(per_layer: Load, *, is_busy: Bools) -> float:
    """Average over the layers with traffic; 1.0 if there are none."""
    return float(per_layer[is_busy].mean()) if is_busy.any() else 1.0


def mean_over_kinds(of_kinds: Sequence[Load] | Load, weights: Weights) -> Load:
    """Average arrays, one for each kind of traffic; `weights`, [kinds], sum to 1."""
    mean: Load = np.asarray(np.tensordot(weights, of_kinds, axes=1), dtype=np.float64)
    return mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """How balanced one load is under two layouts of the same ranks."""

    before: float
    """Balancedness under the current layout, averaged over the layers with traffic."""
    after: float
    """Balancedness under the target layout."""
    gain_of_layer: Load
    """Increase of each layer's balancedness, [layers]."""
    busiest_before: float
    """Load of the busiest rank under the current layout, summed over layers."""
    busiest_after: float
    """The same under the target layout."""


def compare(current: Layout, target: Layout, *loads: Load) -> tuple[Comparison, ...]:
    """Compare two layouts on each load, [layers, experts] in any unit."""
    found = []
    for before, after in zip(_loads(current, loads), _loads(target, loads), strict=True):
        old, new = balancedness_per_layer(before), balancedness_per_layer(after)
        is_busy = before.max(axis=-1) > 0
        found.append(
            Comparison(
                before=mean_if_busy(old, is_busy=is_busy),
                after=mean_if_busy(new, is_busy=is_busy),
                gain_of_layer=new - old,
                busiest_before=float(before.max(axis=-1).sum()),
                busiest_after=float(after.max(axis=-1).sum()),
            )
        )
    return tuple(found)


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

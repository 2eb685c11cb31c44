"""Shares: the fraction of its expert's load that each slot serves, as whole numbers.

A share counts 1/32768ths, so shares compare and sum exactly and survive every file format. `None`
instead of a table stands for even splits.
"""

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable, Indices, Load, ShareTable

WHOLE = 1 << 15
"""All of an expert's load. Two bytes per slot are far more precise than loads are known."""


def even_shares(expert_of_slot: ExpertTable, *, num_experts: int) -> ShareTable:
    """Return the even split as a table, [layers, slots]: as close to 1/n as whole numbers allow."""
    order, place, count = _by_expert(expert_of_slot, num_experts)
    ends = (place + 1) * WHOLE // count
    begins = place * WHOLE // count
    return _in_slot_order(ends - begins, order, expert_of_slot)


def whole_shares(parts: Load, expert_of_slot: ExpertTable, *, num_experts: int) -> ShareTable:
    """Convert fractions from 0 to 1, [layers, slots], to shares that sum exactly.

    Rounds the cumulative sums of an expert's fractions, so no share is off by more than one.
    """
    order, place, count = _by_expert(expert_of_slot, num_experts)
    running = np.cumsum(parts.ravel()[order])
    first = np.arange(len(order)) - place
    before = np.where(first > 0, running[first - 1], 0.0)
    ends = np.clip(np.rint((running - before) * WHOLE), 0, WHOLE).astype(np.int64)
    ends[place == count - 1] = WHOLE
    begins = np.where(place > 0, np.roll(ends, 1), 0)
    return _in_slot_order(ends - begins, order, expert_of_slot)


def fault_in_shares(
    shares: ShareTable, expert_of_slot: ExpertTable, *, num_experts: int
) -> str | None:
    """Describe what is wrong with a table of shares; None if it is valid."""
    if shares.shape != expert_of_slot.shape:
        return f"shares have the shape {shares.shape}, slots {expert_of_slot.shape}"
    outside = (shares < 0) | (shares > WHOLE)
    if outside.any():
        layer, slot = (int(index) for index in np.argwhere(outside)[0])
        return (
            f"layer {layer}, slot {slot} has a share of {int(shares[layer, slot])}, "
            f"but shares range from 0 to {WHOLE}"
        )
    sums = np.bincount(
        _keys(expert_of_slot, num_experts),
        weights=shares.ravel(),
        minlength=len(shares) * (num_experts + 1),
    ).reshape(len(shares), num_experts + 1)
    if sums[:, num_experts].any():
        layer = int(np.flatnonzero(sums[:, num_experts])[0])
        return f"layer {layer}: an empty slot has a share, but shares belong to experts"
    wrong = sums[:, :num_experts] != WHOLE
    if wrong.any():
        layer, expert = (int(index) for index in np.argwhere(wrong)[0])
        return (
            f"layer {layer}: the shares of expert {expert} sum to {int(sums[layer, expert])}, "
            f"not {WHOLE}"
        )
    return None


def _by_expert(expert_of_slot: ExpertTable, num_experts: int) -> tuple[Indices, Indices, Indices]:
    """Sort slots by layer, expert and slot; also index and count among the expert's slots."""
    keys = _keys(expert_of_slot, num_experts)
    order = np.argsort(keys, kind="stable")
    count = np.bincount(keys, minlength=len(expert_of_slot) * (num_experts + 1))
    sorted_keys = keys[order]
    place = np.arange(len(keys)) - (np.cumsum(count) - count)[sorted_keys]
    return order, place, count[sorted_keys]


def _keys(expert_of_slot: ExpertTable, num_experts: int) -> Indices:
    """Number the experts of all layers, [layers * slots]; empty slots count as one more expert."""
    experts = np.where(expert_of_slot == EMPTY, num_experts, expert_of_slot)
    keys: Indices = experts + np.arange(len(experts))[:, None] * (num_experts + 1)
    return keys.ravel()


def _in_slot_order(shares: Indices, order: Indices, expert_of_slot: ExpertTable) -> ShareTable:
    table = np.empty(expert_of_slot.shape, dtype=np.int32)
    table.ravel()[order] = shares
    table[expert_of_slot == EMPTY] = 0
    return table

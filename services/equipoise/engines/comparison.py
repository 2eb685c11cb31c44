"""Checksums of an engine's slots: what ranks exchange before the first move, and compare later."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.planning.arrays import Bools, Checksums, ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.rank.held import Contents

_NAME_BYTES = 256
"""Room for a worker's name."""

HEAD_BYTES = _NAME_BYTES + 8
"""Of a rank's row: its worker's name, and the number of the weights that it has hashed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """What all ranks hold."""

    workers: tuple[str, ...]
    """The workers of all ranks."""

    versions: frozenset[int]
    """Numbers of the weights that the ranks have hashed."""

    table: Checksums
    """Checksums by expert, uint8 [layers, experts, 16]."""

    conflict: str
    """Which replicas of an expert hold different bytes; empty if there are none."""

    share_changed: float
    """Share of the slots that hold other bytes of their experts than before; 0 the first time."""

    first_changed: str
    """The first such slot, in words; empty if there is none."""

    first_kept: str
    """The first slot in words that a switch has filled since and that does not, although others of
    its layer do; empty if there is none."""


def held_row(worker: str, version: int, checksums: Checksums) -> Tensor:
    """Return a rank's row: its worker's name in ASCII, and what it has hashed of its own slots.

    `version` is the number of the weights that the checksums are of.
    """
    head = worker.encode("ascii").ljust(_NAME_BYTES) + version.to_bytes(8, "little")
    return torch.frombuffer(bytearray(head + checksums.tobytes()), dtype=torch.uint8)


def compare(rows: Tensor, layout: Layout, before: Checksums | None, *, filled: Bools) -> Comparison:
    """Compare what the ranks hold as `layout`; `rows` are those of all ranks, in order.

    `before` is the table that they agreed on the last time; None the first time. `filled` are the
    slots that switches have filled since, [layers, slots].
    """
    held = rows.numpy()
    workers = tuple(row.tobytes().decode("ascii").rstrip() for row in held[:, :_NAME_BYTES])
    versions = (int.from_bytes(row.tobytes(), "little") for row in held[:, _NAME_BYTES:HEAD_BYTES])
    experts = layout.expert_of_slot
    num_layers, num_slots = experts.shape
    by_rank = held[:, HEAD_BYTES:].reshape(layout.num_ranks, num_layers, -1, CHECKSUM_BYTES)
    of_slot = by_rank.swapaxes(0, 1).reshape(num_layers, num_slots, CHECKSUM_BYTES)
    layers = np.arange(num_layers)[:, None]
    table = np.zeros((num_layers, layout.num_experts, CHECKSUM_BYTES), dtype=np.uint8)
    table[layers, experts] = of_slot
    table.flags.writeable = False

    def place(slot: int) -> str:
        return f"slot {slot} ({workers[slot // layout.slots_per_rank]})"

    def first(chosen: Bools) -> str:
        for layer, slot in np.argwhere(chosen)[:1].tolist():
            return f"{place(slot)} of layer {layer}, expert {experts[layer, slot]}"
        return ""

    conflict, changed, kept, share = "", "", "", 0.0
    differs = (table[layers, experts] != of_slot).any(axis=2)
    if differs.any():
        layer, slot = (int(index) for index in np.argwhere(differs)[0])
        expert = int(experts[layer, slot])
        other = int(np.flatnonzero(experts[layer] == expert)[-1])  # Whose bytes the table has.
        conflict = (
            f"replicas of expert {expert} of layer {layer} differ: {place(slot)} and "
            f"{place(other)} have different weights; restart the engine"
        )
    if before is not None:
        is_changed = (before[layers, experts] != of_slot).any(axis=2)
        share = float(is_changed.mean())
        changed = first(is_changed)
        kept = first(filled & ~is_changed & is_changed.any(axis=1, keepdims=True))
    return Comparison(
        workers=workers,
        versions=frozenset(versions),
        table=table,
        conflict=conflict,
        share_changed=share,
        first_changed=changed,
        first_kept=kept,
    )


def differs(contents: Contents, table: Checksums, *, rank: int) -> bool:
    """Whether slots of a rank hold other bytes than `table`, [layers, experts, 16], says."""
    experts = _own(contents.layout, rank)
    return bool((contents.checksums != table[np.arange(len(experts))[:, None], experts]).any())


def is_updated(after: Contents, before: Contents, *, rank: int) -> bool:
    """Whether slots of a rank hold the same experts as before with other bytes.

    A switch does not touch these slots, so the weights were updated.
    """
    is_kept = _own(after.layout, rank) == _own(before.layout, rank)
    return bool((after.checksums != before.checksums)[is_kept].any())


def _own(layout: Layout, rank: int) -> ExpertTable:
    return layout.expert_of_slot[:, layout.own_slots(rank)]

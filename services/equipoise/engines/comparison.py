"""Checksums of an engine's slots: what ranks exchange before the first move, and compare later."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.planning.arrays import Checksums, ExpertTable
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.rank.held import Contents

NAME_BYTES = 256
"""Room for a worker's name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """What all ranks hold."""

    workers: tuple[str, ...]
    """The workers of all ranks."""

    table: Checksums
    """Checksums by expert, uint8 [layers, experts, 16]."""

    conflict: str
    """Which replicas of an expert hold different bytes; empty if there are none."""

    def share_changed(self, before: Checksums | None) -> float:
        """Return the share of the experts whose bytes are not those in `before`."""
        return 0.0 if before is None else float((self.table != before).any(axis=2).mean())


def held_row(worker: str, checksums: Checksums) -> Tensor:
    """Return a rank's row: its worker's name in ASCII, and the checksums of its own slots."""
    row = worker.encode("ascii").ljust(NAME_BYTES) + checksums.tobytes()
    return torch.frombuffer(bytearray(row), dtype=torch.uint8)


def compare(rows: Tensor, layout: Layout) -> Comparison:
    """Compare what the ranks hold as `layout`; `rows` are those of all ranks, in order."""
    held = rows.numpy()
    workers = tuple(row.tobytes().decode("ascii").rstrip() for row in held[:, :NAME_BYTES])
    num_layers, num_slots = layout.expert_of_slot.shape
    by_rank = held[:, NAME_BYTES:].reshape(layout.num_ranks, num_layers, -1, CHECKSUM_BYTES)
    of_slot = by_rank.swapaxes(0, 1).reshape(num_layers, num_slots, CHECKSUM_BYTES)
    layers = np.arange(num_layers)[:, None]
    table = np.zeros((num_layers, layout.num_experts, CHECKSUM_BYTES), dtype=np.uint8)
    table[layers, layout.expert_of_slot] = of_slot
    table.flags.writeable = False
    differs = (table[layers, layout.expert_of_slot] != of_slot).any(axis=2)
    conflict = ""
    if differs.any():
        layer, slot = (int(index) for index in np.argwhere(differs)[0])
        conflict = (
            f"replicas of expert {int(layout.expert_of_slot[layer, slot])} of layer {layer} differ "
            f"(slot {slot}, {workers[slot // layout.slots_per_rank]}): ranks loaded different "
            "weights; restart the engine"
        )
    return Comparison(workers=workers, table=table, conflict=conflict)


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

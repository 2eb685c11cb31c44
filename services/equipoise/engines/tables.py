"""`replica_tables`: where each expert's replicas are, as both engines look it up."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.planning.layout import Layout
from equipoise.rank.errors import StageRejectedError


class ReplicaTables(NamedTuple):
    """A layout from the experts' side."""

    expert_of_slot: npt.NDArray[np.int64]
    """[layers, slots]."""
    slots_of_expert: npt.NDArray[np.int64]
    """Ascending, [layers, experts, most replicas]; -1 where unused."""
    replica_count: npt.NDArray[np.int64]
    """[layers, experts]."""


def replica_tables(layout: Layout, *, max_replicas: int) -> ReplicaTables:
    """Return the tables of a layout.

    Raises:
        StageRejectedError: it gives slots uneven shares, or an expert more than `max_replicas`.
    """
    if layout.share_of_slot is not None:
        raise StageRejectedError(
            f"generation {layout.generation} gives replicas uneven shares, but this engine chooses "
            "among them evenly: pin a layout with even shares"
        )
    table = layout.expert_of_slot.astype(np.int64)
    num_layers, num_slots = table.shape
    order = np.argsort(table, axis=1, kind="stable")
    experts = np.take_along_axis(table, order, axis=1)
    is_first = np.ones_like(experts, dtype=bool)
    is_first[:, 1:] = experts[:, 1:] != experts[:, :-1]
    first = np.maximum.accumulate(np.where(is_first, np.arange(num_slots), 0), axis=1)
    replica = np.arange(num_slots) - first
    most = int(replica.max()) + 1
    if most > max_replicas:
        raise StageRejectedError(
            f"generation {layout.generation} has an expert with {most} replicas, but this engine "
            f"has room for {max_replicas}"
        )
    layers = np.arange(num_layers)[:, None]
    slots = np.full((num_layers, layout.num_experts, most), -1, dtype=np.int64)
    slots[layers, experts, replica] = order
    return ReplicaTables(table, slots, (slots >= 0).sum(axis=2))

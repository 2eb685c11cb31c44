"""The tensors of DeepSeek's EPLB as .npz: MoE layers only.

Loads: `weight` [layers, experts]; several windows have three dimensions.
Layouts: `phy2log` [layers, slots], `log2phy` [layers, experts, most replicas], padded with -1, and
`logcnt` [layers, experts]; and `num_gpus`, the number of ranks, if known.
"""

from typing import Any

import numpy as np

from equipoise.formats import npz_file
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording
from equipoise.formats.tables import ids_2d, loads_3d, member, shown, whole
from equipoise.planning.arrays import ExpertTable
from equipoise.planning.layout import count_replicas

LOADS_KEY = "weight"
LAYOUT_KEY = "phy2log"


def recording(document: Any) -> Recording:
    """Read loads.

    Raises:
        FormatError: the document has another form.
    """
    windows = loads_3d(member(document, LOADS_KEY))
    return Recording(windows=windows, names=tuple(str(i) for i in range(len(windows))))


def recording_npz(recording: Recording) -> bytes:
    """Write `weight`, with two dimensions if there is one window."""
    windows = recording.windows
    return npz_file.dump({LOADS_KEY: windows[0] if len(windows) == 1 else windows})


def placement(document: Any, expected: Expected) -> ExpertPlacement:
    """Read a layout; the other two tensors, if present, must agree with `phy2log`.

    Raises:
        FormatError: the document has another form, or contradicts itself.
    """
    table = ids_2d(member(document, LAYOUT_KEY))
    counts = document.get("logcnt")
    ranks = document.get("num_gpus")
    placement = expected.placement(
        table,
        num_experts=None if counts is None else ids_2d(counts).shape[1],
        num_ranks=None if ranks is None else whole(ranks, "num_gpus", least=1),
    )
    _check_agreement(document, placement)
    return placement


def placement_npz(placement: ExpertPlacement) -> bytes:
    """Write all three tensors as int64, like EPLB."""
    table, num_experts = placement.expert_of_slot, placement.num_experts
    tensors = {
        LAYOUT_KEY: table.astype(np.int64),
        "log2phy": _slots_of_experts(table, num_experts),
        "logcnt": count_replicas(table, num_experts=num_experts).astype(np.int64),
    }
    if placement.num_ranks is not None:
        tensors["num_gpus"] = np.array(placement.num_ranks, dtype=np.int64)
    return npz_file.dump(tensors)


def _slots_of_experts(table: ExpertTable, num_experts: int) -> Any:
    """List slots by expert, int64 [layers, experts, most replicas], ascending, padded with -1."""
    counts = count_replicas(table, num_experts=num_experts)
    slots = np.full((*counts.shape, counts.max()), -1, dtype=np.int64)
    for layer, row in enumerate(table):
        order = np.argsort(row, kind="stable")
        starts = np.cumsum(counts[layer]) - counts[layer]
        position = np.arange(len(row)) - np.repeat(starts, counts[layer])
        slots[layer, row[order], position] = order
    return slots


def _check_agreement(document: dict[str, Any], placement: ExpertPlacement) -> None:
    table, num_experts = placement.expert_of_slot, placement.num_experts
    counts = document.get("logcnt")
    if counts is not None:
        found = ids_2d(counts)
        expected = count_replicas(table, num_experts=num_experts)
        if found.shape != expected.shape:
            raise FormatError(
                f"logcnt has the shape {list(found.shape)}, not {list(expected.shape)}"
            )
        if (found != expected).any():
            layer, expert = (int(index) for index in np.argwhere(found != expected)[0])
            raise FormatError(
                f"layer {layer}: logcnt says {int(found[layer, expert])} replicas of expert "
                f"{expert}, phy2log has {int(expected[layer, expert])}"
            )
    slots = document.get("log2phy")
    if slots is not None:
        _check_slots(slots, placement)


def _check_slots(slots: Any, placement: ExpertPlacement) -> None:
    """Compare slots per expert; their order and the width of the padding are free."""
    expected = _slots_of_experts(placement.expert_of_slot, placement.num_experts)
    width = expected.shape[2]
    is_ids = isinstance(slots, np.ndarray) and slots.dtype.kind in "iu" and slots.ndim == 3
    if not is_ids or slots.shape[:2] != expected.shape[:2] or slots.shape[2] < width:
        raise FormatError(
            f"log2phy must be whole numbers of shape {list(expected.shape)}, not {shown(slots)}"
        )
    found = -np.sort(-slots.astype(np.int64), axis=2)
    wanted = -np.sort(-expected, axis=2)
    differs = (found[:, :, :width] != wanted).any(axis=2) | (found[:, :, width:] != -1).any(axis=2)
    if differs.any():
        layer, expert = (int(index) for index in np.argwhere(differs)[0])
        raise FormatError(
            f"layer {layer}: log2phy does not name the slots of expert {expert} that phy2log does"
        )

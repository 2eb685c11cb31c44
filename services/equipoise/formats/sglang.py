"""SGLang's files. Its rows are all decoder layers of the model, so dense layers have rows too.

Loads: what the recorder dumps in mode `stat` or `stat_approx`, {rank, logical_count,
average_utilization_rate_over_window}, as .pt or (as people keep them) as JSON. `logical_count` is
[layers][experts], or [buffer][layers][experts] with a row of zeros for each dense layer; the buffer
is circular, so its windows are not in order of time.
Layouts: {"physical_to_logical_map": [layers][slots]} and no other key, for --init-expert-location.
"""

import json
from typing import Any

import numpy as np

from equipoise.formats import torch_file
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import Placement
from equipoise.formats.recording import Recording
from equipoise.formats.tables import ids_2d, loads_3d, member
from equipoise.formats.text import number_rows

LOADS_KEY = "logical_count"
LAYOUT_KEY = "physical_to_logical_map"

_SINGLE_PASSES = "records"


def has_recording(document: Any) -> bool:
    """Whether a document is one of these."""
    return isinstance(document, dict) and bool({LOADS_KEY, _SINGLE_PASSES} & document.keys())


def has_placement(document: Any) -> bool:
    """Whether a document is one of these."""
    return isinstance(document, dict) and LAYOUT_KEY in document


def recording(document: Any) -> Recording:
    """Loads of all decoder layers: dense rows are still there.

    Raises:
        FormatError: the document has another form.
    """
    if not isinstance(document, dict):
        raise FormatError(f"an object with {LOADS_KEY!r} was expected")
    if _SINGLE_PASSES in document:
        raise FormatError("recordings of single passes are not read: record in mode stat")
    windows = loads_3d(member(document, LOADS_KEY))
    # Slots of the circular buffer that were never filled are no windows.
    filled = windows.any(axis=(1, 2)) | ~np.isfinite(windows).all(axis=(1, 2))
    windows = windows[filled] if filled.any() else windows
    return Recording(
        windows=windows, names=tuple(str(i) for i in range(len(windows))), first_moe_layer=0
    )


def recording_pt(recording: Recording) -> bytes:
    """A recorder's .pt file, dense rows put back.

    Raises:
        FormatError: it is not known how many there are.
    """
    windows = _with_dense_rows(recording)
    whole = windows == np.trunc(windows)
    dtype = "<i8" if whole.all() else "<f8"
    document = {
        "rank": 0,
        LOADS_KEY: windows.astype(dtype),
        "average_utilization_rate_over_window": None,
    }
    return torch_file.dump(document)


def recording_json(recording: Recording) -> bytes:
    """The same as JSON; a single window has two dimensions.

    Raises:
        FormatError: it is not known how many dense layers there are.
    """
    windows = _with_dense_rows(recording)
    matrices = [f"[{number_rows(window)}]" for window in windows]
    body = matrices[0] if len(matrices) == 1 else f"[{','.join(matrices)}]"
    return f'{{"{LOADS_KEY}": {body}}}\n'.encode()


def placement(document: Any, expected: Expected) -> Placement:
    """A layout of the MoE layers; without `expected.first_moe_layer`, of all rows.

    Raises:
        FormatError: the document has another form.
    """
    if not isinstance(document, dict):
        raise FormatError(f"an object with {LAYOUT_KEY!r} was expected")
    table = ids_2d(member(document, LAYOUT_KEY))
    first = expected.first_moe_layer or 0
    if first >= len(table):
        raise FormatError(f"it has {len(table)} layers, so the first MoE layer cannot be {first}")
    return expected.placement(table[first:], first_moe_layer=first)


def placement_json(placement: Placement) -> bytes:
    """JSON for --init-expert-location; dense rows hold experts in order, and nobody reads them.

    Raises:
        FormatError: it is not known how many there are.
    """
    num_dense = _num_dense(placement.first_moe_layer)
    plain = np.arange(placement.num_slots, dtype=np.int32) % placement.num_experts
    table = np.concatenate([np.tile(plain, (num_dense, 1)), placement.expert_of_slot])
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table.tolist())
    return f'{{"{LAYOUT_KEY}": [\n{rows}]}}\n'.encode()


def _with_dense_rows(recording: Recording) -> Any:
    num_dense = _num_dense(recording.first_moe_layer)
    return np.pad(recording.windows, ((0, 0), (num_dense, 0), (0, 0)))


def _num_dense(first_moe_layer: int | None) -> int:
    if first_moe_layer is None:
        raise FormatError(
            "SGLang counts dense layers too, and what was read does not say how many there are: "
            "say --first-moe-layer"
        )
    return first_moe_layer

"""SGLang's files. Rows are all decoder layers of the model, including dense ones.

Loads: what the recorder dumps in mode `stat` or `stat_approx`, {rank, logical_count,
average_utilization_rate_over_window}, as .pt or JSON. `logical_count` is
[layers][experts], or [buffer][layers][experts] with a row of zeros for each dense layer; the buffer
is circular, so its windows are not in order of time.
Layouts: {"physical_to_logical_map": [layers][slots]} and no other key, for --init-expert-location.
"""

from typing import Any

import numpy as np

from equipoise.formats import torch_file
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording
from equipoise.formats.tables import ids_2d, loads_3d, member
from equipoise.formats.text import id_rows, number_rows

LOADS_KEY = "logical_count"
LAYOUT_KEY = "physical_to_logical_map"
SINGLE_PASSES_KEY = "records"


def recording(document: Any) -> Recording:
    """Read the loads of all decoder layers, including dense rows.

    Raises:
        FormatError: the document has another form.
    """
    if not isinstance(document, dict):
        raise FormatError(f"an object with {LOADS_KEY!r} is required")
    if SINGLE_PASSES_KEY in document:
        raise FormatError("recordings of single passes are not supported: record in mode stat")
    windows = loads_3d(member(document, LOADS_KEY))
    # Unused entries of the circular buffer are not windows.
    filled = windows.any(axis=(1, 2)) | ~np.isfinite(windows).all(axis=(1, 2))
    windows = windows[filled] if filled.any() else windows
    return Recording(
        windows=windows, names=tuple(str(i) for i in range(len(windows))), first_moe_layer=0
    )


def recording_pt(recording: Recording) -> bytes:
    """Write a recorder's .pt file, including dense rows.

    Raises:
        FormatError: the number of dense layers is unknown.
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
    """Write the same as JSON; a single window has two dimensions.

    Raises:
        FormatError: the number of dense layers is unknown.
    """
    windows = _with_dense_rows(recording)
    matrices = [f"[{number_rows(window)}]" for window in windows]
    body = matrices[0] if len(matrices) == 1 else f"[{','.join(matrices)}]"
    return f'{{"{LOADS_KEY}": {body}}}\n'.encode()


def placement(document: Any, expected: Expected) -> ExpertPlacement:
    """Read a layout of the MoE layers; of all rows without `expected.first_moe_layer`.

    Raises:
        FormatError: the document has another form.
    """
    table = ids_2d(member(document, LAYOUT_KEY))
    first = expected.first_moe_layer or 0
    if first >= len(table):
        raise FormatError(f"it has {len(table)} layers, so the first MoE layer cannot be {first}")
    return expected.placement(table[first:], first_moe_layer=first)


def placement_json(placement: ExpertPlacement) -> bytes:
    """Write JSON for --init-expert-location; dense rows hold experts in order and are unused.

    Raises:
        FormatError: the number of dense layers is unknown.
    """
    num_dense = _num_dense(placement.first_moe_layer)
    plain = np.arange(placement.num_slots, dtype=np.int32) % placement.num_experts
    table = np.concatenate([np.tile(plain, (num_dense, 1)), placement.expert_of_slot])
    return f'{{"{LAYOUT_KEY}": [\n{id_rows(table)}]}}\n'.encode()


def _with_dense_rows(recording: Recording) -> Any:
    num_dense = _num_dense(recording.first_moe_layer)
    return np.pad(recording.windows, ((0, 0), (num_dense, 0), (0, 0)))


def _num_dense(first_moe_layer: int | None) -> int:
    if first_moe_layer is None:
        raise FormatError(
            "SGLang counts dense layers too, and the input does not say how many there are: "
            "set --first-moe-layer"
        )
    return first_moe_layer

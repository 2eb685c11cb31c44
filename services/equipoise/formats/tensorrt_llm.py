"""TensorRT-LLM's files. Layers are numbered as in the model, MoE layers only: 3 to 60 for V3.

Layouts: the load balancer's YAML, {num_slots, initial_global_assignments: {layer: [slots]},
layer_updates_per_iter}; slots are in rank order.
Loads: a folder with meta_info.json and rank{r}.safetensors, tensors "{iteration}_{layer}" [experts]
that are summed over ranks; an iteration is a window. rank{r}_raw.safetensors are not read.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.formats import safetensors_file
from equipoise.formats.container import META_INFO
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording
from equipoise.formats.tables import ids_2d, member, shown, whole

LAYOUT_KEY = "initial_global_assignments"

_RAW = "_raw.safetensors"
_TENSOR = re.compile(r"(\d{1,9})_(\d{1,9})")


def placement(document: Any, expected: Expected) -> ExpertPlacement:
    """Read a layout.

    Raises:
        FormatError: the document has another form.
    """
    rows = member(document, LAYOUT_KEY)
    if not isinstance(rows, dict) or not rows:
        raise FormatError(f"{LAYOUT_KEY} must be a mapping of layers, not {shown(rows)}")
    row_of_layer = {whole(layer, f"{LAYOUT_KEY}: a layer"): row for layer, row in rows.items()}
    if len(row_of_layer) != len(rows):
        raise FormatError(f"{LAYOUT_KEY} names a layer twice")
    first = _first_of(row_of_layer.keys(), LAYOUT_KEY)
    table = ids_2d([row_of_layer[layer] for layer in sorted(row_of_layer)], first_layer=first)
    num_slots = whole(member(document, "num_slots"), "num_slots", least=1)
    if num_slots != table.shape[1]:
        raise FormatError(f"num_slots is {num_slots}, but layer {first} has {table.shape[1]} slots")
    return expected.placement(table, first_moe_layer=first)


def placement_yaml(placement: ExpertPlacement) -> bytes:
    """Write the YAML of a static layout, one line per layer.

    Raises:
        FormatError: the first MoE layer is unknown.
    """
    first = _known_first(placement.first_moe_layer)
    lines = [f"num_slots: {placement.num_slots}", "layer_updates_per_iter: 0", f"{LAYOUT_KEY}:"]
    for row, experts in enumerate(placement.expert_of_slot.tolist()):
        lines.append(f"  {first + row}: {json.dumps(experts)}")
    return ("\n".join(lines) + "\n").encode()


def recording(members: Mapping[str, bytes]) -> Recording:
    """Read loads from the files of a folder, one window per iteration.

    Raises:
        FormatError: a file is damaged, or the tensors are not those of a recording.
    """
    top_k, num_experts = _meta_info(members)
    sums: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
    for name in sorted(members.keys() - {META_INFO}):
        if name.endswith(_RAW):
            continue
        try:
            tensors = safetensors_file.load(members[name])
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from None
        for key, counts in tensors.items():
            place = _place(key, name)
            if counts.shape != (num_experts,):
                raise FormatError(
                    f"{name}: layer {place[1]}, iteration {place[0]} has counts of shape "
                    f"{list(counts.shape)}, but {META_INFO} says {num_experts} experts"
                )
            before = sums.get(place)
            counted = counts.astype(np.float64)
            sums[place] = counted if before is None else before + counted
    if not sums:
        raise FormatError("rank*.safetensors have no tensors")
    iterations = sorted({iteration for iteration, _ in sums})
    layers = sorted({layer for _, layer in sums})
    first = _first_of(layers, "statistics")
    for iteration in iterations:
        for layer in layers:
            if (iteration, layer) not in sums:
                raise FormatError(f"layer {layer} is missing in iteration {iteration}")
    windows = [[sums[iteration, layer] for layer in layers] for iteration in iterations]
    return Recording(
        windows=np.array(windows),
        names=tuple(str(iteration) for iteration in iterations),
        first_moe_layer=first,
        top_k=top_k,
    )


def recording_members(recording: Recording) -> dict[str, bytes]:
    """Write the files of a folder of statistics, as of one rank.

    Raises:
        FormatError: the first MoE layer or the experts per token are unknown.
    """
    first = _known_first(recording.first_moe_layer)
    if recording.top_k is None:
        raise FormatError("TensorRT-LLM needs num_experts_per_token: set --top-k")
    whole_numbers = (recording.windows == np.trunc(recording.windows)).all()
    windows = recording.windows.astype("<i8") if whole_numbers else recording.windows
    tensors = {
        f"{iteration}_{first + row}": windows[iteration, row]
        for iteration in range(recording.num_windows)
        for row in range(recording.num_layers)
    }
    meta_info = {
        "num_experts": recording.num_experts,
        "num_experts_per_token": recording.top_k,
    }
    return {
        META_INFO: f"{json.dumps(meta_info)}\n".encode(),
        "rank0.safetensors": safetensors_file.dump(tensors),
    }


def _meta_info(members: Mapping[str, bytes]) -> tuple[int | None, int]:
    """Return the experts per token, if present, and the experts."""
    if META_INFO not in members:
        raise FormatError(f"{META_INFO} is missing")
    try:
        document = json.loads(members[META_INFO])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{META_INFO} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{META_INFO} must be an object, not {shown(document)}")
    top_k = document.get("num_experts_per_token")
    return (
        None if top_k is None else whole(top_k, f"{META_INFO}: num_experts_per_token", least=1),
        whole(member(document, "num_experts"), f"{META_INFO}: num_experts", least=1),
    )


def _place(key: str, name: str) -> tuple[int, int]:
    """Parse the iteration and layer of a tensor."""
    match = _TENSOR.fullmatch(key)
    if match is None:
        raise FormatError(f"{name}: tensor {key[:40]!r} is not named iteration_layer")
    return int(match[1]), int(match[2])


def _first_of(layers: Any, what: str) -> int:
    """Return the first of consecutive layers."""
    first, last = min(layers), max(layers)
    if last - first + 1 != len(layers):
        missing = next(layer for layer in range(first, last) if layer not in set(layers))
        raise FormatError(f"{what}: layer {missing} is missing between {first} and {last}")
    return int(first)


def _known_first(first_moe_layer: int | None) -> int:
    if first_moe_layer is None:
        raise FormatError(
            "TensorRT-LLM numbers layers as the model does, and the input does not say which "
            "is the first MoE layer: set --first-moe-layer"
        )
    return first_moe_layer

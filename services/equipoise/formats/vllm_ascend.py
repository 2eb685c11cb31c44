"""vllm-ascend's expert_map.json: devices of each layer, and the experts of each device.

Layers are MoE layers from 0, devices are ranks. An expert may not be twice on a device, and all
devices have equally many.
"""

import json
from typing import Any

import numpy as np

from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.tables import ids_2d, member, shown, whole

LAYOUT_KEY = "layer_list"


def placement(document: Any, expected: Expected) -> ExpertPlacement:
    """Read a layout.

    Raises:
        FormatError: the document has another form, or a device holds an expert twice.
    """
    layers = _in_order(member(document, LAYOUT_KEY), "layer_id", LAYOUT_KEY)
    num_layers = whole(document.get("moe_layer_count", len(layers)), "moe_layer_count")
    if num_layers != len(layers):
        raise FormatError(f"moe_layer_count is {num_layers}, but {len(layers)} layers are listed")
    table, num_ranks = [], None
    for layer, entry in enumerate(layers):
        row, devices = _row(entry, f"layer {layer}")
        if num_ranks not in {None, devices}:
            raise FormatError(f"layer {layer} has {devices} devices, layer 0 has {num_ranks}")
        num_ranks = devices
        table.append(row)
    return expected.placement(ids_2d(table), num_ranks=num_ranks)


def placement_json(placement: ExpertPlacement) -> bytes:
    """Write one line per layer.

    Raises:
        FormatError: the number of ranks is unknown, or a rank holds an expert twice.
    """
    if placement.num_ranks is None:
        raise FormatError("vllm-ascend lists experts by device: set --ranks")
    by_rank = placement.expert_of_slot.reshape(placement.num_layers, placement.num_ranks, -1)
    ordered = np.sort(by_rank, axis=2)
    twins = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if len(twins):
        layer, rank, position = (int(index) for index in twins[0])
        raise FormatError(
            f"layer {layer}: device {rank} would hold expert {int(ordered[layer, rank, position])} "
            f"twice, which vllm-ascend rejects"
        )
    body = ",\n".join(_layer_json(layer, ranks) for layer, ranks in enumerate(by_rank.tolist()))
    return f'{{"moe_layer_count": {placement.num_layers}, "layer_list": [\n{body}]}}\n'.encode()


def _layer_json(layer: int, experts_of_rank: list[list[int]]) -> str:
    devices = [
        {"device_id": rank, "device_expert": experts}
        for rank, experts in enumerate(experts_of_rank)
    ]
    return json.dumps(
        {"layer_id": layer, "device_count": len(devices), "device_list": devices},
        separators=(",", ":"),
    )


def _row(entry: dict[Any, Any], layer: str) -> tuple[list[Any], int]:
    """Return the experts of a layer in slot order, and the number of devices."""
    devices = _in_order(member(entry, "device_list"), "device_id", f"{layer}: device_list")
    if whole(entry.get("device_count", len(devices)), f"{layer}: device_count") != len(devices):
        raise FormatError(f"{layer}: device_count is not the {len(devices)} devices listed")
    row: list[Any] = []
    for rank, device in enumerate(devices):
        experts = member(device, "device_expert")
        if not isinstance(experts, list) or not experts:
            raise FormatError(
                f"{layer}, device {rank}: device_expert must be a list of experts, "
                f"not {shown(experts)}"
            )
        if len(experts) * (rank + 1) != len(row) + len(experts):
            raise FormatError(
                f"{layer}: device {rank} has {len(experts)} slots, but those before "
                f"have {len(row) // rank} each"
            )
        seen = [one for one in experts if type(one) is int]
        if len(set(seen)) != len(seen):
            twin = next(one for one in seen if seen.count(one) > 1)
            raise FormatError(f"{layer}: device {rank} holds expert {twin} twice")
        row += experts
    return row, len(devices)


def _in_order(entries: Any, key: str, what: str) -> list[dict[Any, Any]]:
    """Sort objects by their number, which must count from 0."""
    if not isinstance(entries, list) or not entries:
        raise FormatError(f"{what} must be a list of objects, not {shown(entries)}")
    by_id: dict[int, dict[Any, Any]] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise FormatError(f"{what} must hold objects, not {shown(entry)}")
        number = whole(member(entry, key), f"{what}: {key}")
        if number in by_id:
            raise FormatError(f"{what}: {key} {number} is duplicated")
        by_id[number] = entry
    missing = next((number for number in range(len(by_id)) if number not in by_id), None)
    if missing is not None:
        raise FormatError(f"{what}: {key} {missing} is missing; they must count from 0")
    return [by_id[number] for number in range(len(by_id))]

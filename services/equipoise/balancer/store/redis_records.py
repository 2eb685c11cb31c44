"""Binary records for Redis: a line of JSON, then a table."""

import json
import math
from typing import Any

import numpy as np

from equipoise.planning.layout import Layout
from equipoise.pool.records import AverageRecord


def pack_layout(layout: Layout) -> bytes:
    """Pack a layout without its generation, which is its key."""
    header: dict[str, Any] = {
        "num_layers": layout.num_layers,
        "num_experts": layout.num_experts,
        "num_ranks": layout.num_ranks,
        "slots_of_rank": layout.slots_of_rank,
    }
    table = layout.expert_of_slot.astype("<i4", copy=False).tobytes()
    if layout.share_of_slot is None:
        return _pack(header, table)
    # Shares follow the table; records without shares lack this field.
    header["table_bytes"] = len(table)
    return _pack(header, table + layout.share_of_slot.astype("<u2").tobytes())


def unpack_layout(generation: int, packed: bytes) -> Layout:
    """Unpack a layout.

    Raises:
        InvalidLayoutError, LookupError, TypeError, ValueError: the record is invalid.
    """
    header, cells = _unpack(packed)
    end = header.get("table_bytes", len(cells))
    table = np.frombuffer(cells[:end], dtype="<i4").reshape(header["num_layers"], -1)
    shares = None
    if end < len(cells):
        shares = np.frombuffer(cells[end:], dtype="<u2").reshape(table.shape).astype(np.int32)
    return Layout(
        generation=generation,
        num_experts=header["num_experts"],
        num_ranks=header["num_ranks"],
        slots_of_rank=tuple(header["slots_of_rank"]),
        expert_of_slot=table.astype(np.int32),
        share_of_slot=shares,
    )


def pack_average(record: AverageRecord) -> bytes:
    """Pack an average."""
    num_layers, num_experts = record.decayed_load.shape
    header = {
        "half_life_s": record.half_life_s,
        "time_unix_s": record.time_unix_s,
        "weight_s": record.weight_s,
        "num_layers": num_layers,
        "num_experts": num_experts,
    }
    return _pack(header, record.decayed_load.astype("<f8", copy=False).tobytes())


def unpack_average(packed: bytes) -> AverageRecord:
    """Unpack an average.

    Raises:
        LookupError, TypeError, ValueError: the record is invalid.
    """
    header, cells = _unpack(packed)
    table = np.frombuffer(cells, dtype="<f8")
    numbers = [header[name] for name in ("half_life_s", "time_unix_s", "weight_s")]
    if not (np.isfinite(table).all() and all(map(math.isfinite, numbers)) and numbers[0] > 0):
        raise ValueError("it is not finite")
    half_life_s, time_unix_s, weight_s = numbers
    return AverageRecord(
        half_life_s=half_life_s,
        time_unix_s=time_unix_s,
        weight_s=weight_s,
        decayed_load=table.reshape(header["num_layers"], header["num_experts"]).astype(np.float64),
    )


def unpack_entry(number: bytes, fields: list[bytes]) -> dict[str, Any]:
    """Unpack a numbered record of a stream.

    Raises:
        LookupError, ValueError: the record is invalid.
    """
    record = dict(zip(fields[::2], fields[1::2], strict=True))
    return {"sequence": int(number.partition(b"-")[0]), **json.loads(record[b"record"])}


def _pack(header: dict[str, Any], table: bytes) -> bytes:
    return json.dumps(header, sort_keys=True).encode() + b"\n" + table


def _unpack(packed: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, table = packed.partition(b"\n")
    return json.loads(header), table

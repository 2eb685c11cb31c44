"""Binary records for Redis: a line of JSON, then a table."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.balancer.store.records import (
    Numbered,
    checked_average,
    stored_layout,
    unpack_entry,
    whole,
)
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


def unpack_layout(generation: int | bytes, packed: bytes) -> Layout:
    """Unpack a layout.

    Raises:
        one of INVALID_RECORD: it is not valid.
    """
    header, cells = _unpack(packed)
    end = whole("table_bytes", header.get("table_bytes", len(cells)))
    num_layers = whole("num_layers", header["num_layers"], least=1)
    table = np.frombuffer(cells[:end], dtype="<i4").reshape(num_layers, -1)
    shares = None
    if end < len(cells):
        shares = np.frombuffer(cells[end:], dtype="<u2").reshape(table.shape).astype(np.int32)
    return stored_layout(
        generation=generation,
        num_experts=header["num_experts"],
        num_ranks=header["num_ranks"],
        slots_of_rank=header["slots_of_rank"],
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
        one of INVALID_RECORD: it is not valid.
    """
    header, cells = _unpack(packed)
    table = np.frombuffer(cells, dtype="<f8")
    shape = [whole(name, header[name], least=1) for name in ("num_layers", "num_experts")]
    return checked_average(
        AverageRecord(
            half_life_s=header["half_life_s"],
            time_unix_s=header["time_unix_s"],
            weight_s=header["weight_s"],
            decayed_load=table.reshape(shape).astype(np.float64),
        )
    )


def unpack_stream(
    kind: type[Numbered], entries: Sequence[tuple[bytes, list[bytes]]]
) -> tuple[Numbered, ...]:
    """Unpack numbered records of a stream.

    Raises:
        one of INVALID_RECORD: one is not valid.
    """
    return tuple(
        unpack_entry(
            kind,
            number.partition(b"-")[0],
            dict(zip(values[::2], values[1::2], strict=True))[b"record"],
        )
        for number, values in entries
    )


def _pack(header: dict[str, Any], table: bytes) -> bytes:
    return json.dumps(header, sort_keys=True).encode() + b"\n" + table


def _unpack(packed: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, table = packed.partition(b"\n")
    return json.loads(header), table

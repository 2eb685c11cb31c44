"""Records as stores write and read them: as JSON, and with every value in its range.

What cannot be read raises one of `INVALID_RECORD`; the store names the pool and the record.
"""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar, get_type_hints

import numpy as np
from google.protobuf.message import DecodeError

from equipoise.planning.arrays import ExpertTable, ShareTable
from equipoise.planning.layout import Layout
from equipoise.pool.records import AuditRecord, AverageRecord, DecisionRecord, EpochMembers, Hold
from equipoise.wire import checks
from equipoise.wire.layouts import layout_from_proto, layout_to_proto
from equipoise_api.v1 import worker_link_pb2 as pb

INVALID_RECORD = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    DecodeError,
)
"""What reading a damaged record raises; `InvalidLayoutError` is a ValueError."""

Numbered = TypeVar("Numbered", AuditRecord, DecisionRecord)

_TYPES = {
    kind.__name__: {name: of for name, of in get_type_hints(kind).items() if name != "sequence"}
    for kind in (AuditRecord, DecisionRecord)
}
"""Types by field, without that of the number."""

_JSON_TYPES = {bool: (bool,), int: (int,), float: (float, int)}
"""Types of JSON by that of a field; other fields are text."""


def whole(what: str, found: Any, *, least: int = 0) -> int:
    """Return a stored whole number, which may be written as digits.

    Raises:
        ValueError: it is not one from `least` to `MAX_COUNT`.
    """
    if isinstance(found, bytes):
        found = int(found)
    if type(found) is not int or not least <= found <= checks.MAX_COUNT:
        raise ValueError(f"{what} must be from {least} to 2^53, not {checks.shorten(str(found))}")
    return found


def pack_entry(record: AuditRecord | DecisionRecord) -> str:
    """Return a numbered record as JSON, without its number, which is its key."""
    return json.dumps({key: value for key, value in asdict(record).items() if key != "sequence"})


def unpack_entry(kind: type[Numbered], sequence: int | bytes, packed: str | bytes) -> Numbered:
    """Read what `pack_entry` wrote, without what only later releases know.

    Raises:
        one of INVALID_RECORD: it is not valid.
    """
    types, found = _TYPES[kind.__name__], json.loads(packed)
    known = {name: value for name, value in found.items() if name in types}
    for name, value in known.items():
        check_type(name, value, types[name])
    missing = [one.name for one in fields(kind) if one.default is MISSING and one.name not in found]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    return kind(sequence=whole("its number", sequence, least=1), **known)


def pack_hold(hold: Hold) -> str:
    """Return one line of JSON; the layout in it is the protobuf message, in base64."""
    packed = None
    if hold.pin is not None:
        packed = base64.b64encode(layout_to_proto(hold.pin).SerializeToString()).decode()
    return json.dumps(
        {
            "paused": hold.paused,
            "pinned": hold.pinned,
            "pin": packed,
            "pinned_generation": hold.pinned_generation,
        }
    )


def unpack_hold(packed: str | bytes) -> Hold:
    """Read what `pack_hold` wrote.

    Raises:
        one of INVALID_RECORD: it is not valid.
    """
    record = json.loads(packed)
    for name in ("paused", "pinned"):
        check_type(name, record[name], str)
    if bool(record["pinned"]) != (record["pin"] is not None):
        raise ValueError("a pin must have a layout and a reason")
    pin = None
    if record["pin"] is not None:
        pin = layout_from_proto(pb.Layout.FromString(base64.b64decode(record["pin"])), kind="pin")
    return Hold(
        paused=record["paused"],
        pinned=record["pinned"],
        pin=pin,
        pinned_generation=whole("pinned_generation", record["pinned_generation"]),
    )


def unpack_members(epoch: int | bytes, workers: str | bytes) -> EpochMembers:
    """Read an epoch, and its workers as a JSON list.

    Raises:
        one of INVALID_RECORD: it is not valid.
    """
    names = json.loads(workers)
    if not isinstance(names, list):
        raise TypeError("its workers are not a list")
    return EpochMembers(
        epoch=whole("its epoch", epoch, least=1),
        workers=tuple(checks.name("members", "a worker", name) for name in names),
    )


def stored_layout(
    *,
    generation: int | bytes,
    num_experts: int,
    num_ranks: int,
    expert_of_slot: ExpertTable,
    share_of_slot: ShareTable | None,
    slots_of_rank: Sequence[int] = (),
) -> Layout:
    """Return a layout; the tables are [layers, slots].

    Raises:
        InvalidLayoutError, ValueError: no pool may run it, or a number is out of range.
    """
    num_slots = expert_of_slot.shape[1]
    for what, count in (("num_experts", num_experts), ("num_ranks", num_ranks)):
        if whole(what, count, least=1) > num_slots:  # Checked before tables of that size are made.
            raise ValueError(f"{what} is {count}, but there are {num_slots} slots")
    return Layout(
        generation=whole("generation", generation, least=1),
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_of_rank=tuple(whole("slots_of_rank", count, least=1) for count in slots_of_rank),
        expert_of_slot=expert_of_slot,
        share_of_slot=share_of_slot,
    )


def checked_average(record: AverageRecord) -> AverageRecord:
    """Return an average whose values are in range.

    Raises:
        ValueError: they are not.
    """
    numbers = (record.half_life_s, record.time_unix_s, record.weight_s)
    for number in numbers:
        check_type("a number", number, float)
    if not (np.isfinite(record.decayed_load).all() and all(map(math.isfinite, numbers))):
        raise ValueError("it is not finite")
    if record.half_life_s <= 0 or record.weight_s < 0 or record.decayed_load.min(initial=0.0) < 0:
        raise ValueError("it is negative, or has no half-life")
    return record


def check_type(name: str, value: Any, expected: type) -> None:
    """Raise one of INVALID_RECORD if a value of JSON is not one of a field's type."""
    if type(value) not in _JSON_TYPES.get(expected, (str,)):
        raise TypeError(f"{name} cannot be {checks.shorten(str(value))}")
    if isinstance(value, str):
        value.encode()  # Half a surrogate pair fits into no message.
    elif expected is int:
        whole(name, value)
    elif math.isinf(value) or (math.isnan(value) and name.endswith("unix_s")):
        # Others, such as balancedness without traffic, may be not a number.
        raise ValueError(f"{name} is not finite")

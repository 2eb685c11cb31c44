"""Every field of a message at its limits, from the message's descriptor: new fields included.

`variants` yields a version of a valid message for each field and value, with a name such as
`load_report.stats.steps=1`; `field_names` lists what must be among them. `extremes` are those with
the highest number that is accepted, and `highest` has all of these at once, for what adds up.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from equipoise.planning.layout import Layout
from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.planning.shares import WHOLE as WHOLE_SHARE
from equipoise.planning.topology import ModelShape
from equipoise.wire.balancer_messages import JoinEpoch, Peer
from equipoise.wire.checks import MAX_CELLS, MAX_COUNT, MAX_NAME_BYTES, MAX_TERM
from equipoise.wire.errors import InvalidMessageError
from tests.support.scripted_worker import make_hello

WHOLE = (0, 1, 2**16, 2**16 + 1, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
WIDE = (*WHOLE, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
NEGATIVE = (-1, -(2**31), -(2**31) - 1, -(2**53) - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 5e-324, 3600.0, 3600.1, 1e308, math.inf, -math.inf, math.nan)
TEXTS = {
    "empty": "",
    "blank": " ",
    "newline": "one\ntwo",
    "NUL": "a\0b",
    "64 kB": "a" * 2**16,
    "non-ASCII": "ä語🙂",
    "escape": "\x1b[2J",
    "right to left": "\u202etac",
    "line separator": "a\u2028b",
    "wildcard": "*",
    "path": "../../etc/passwd",
    "percent": "%2F%00%",
    "address": "127.0.0.1:99999",
}
BYTES = {"empty": b"", "one byte": b"\xff", "64 kB": b"\xff" * 2**16}
MANY = 5000
"""Items of a list that is too long, and far below the size that a port takes."""

RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_DEPTH = 6


def variants(base: Message) -> Iterator[tuple[str, Message]]:
    """Versions of `base`, each with one field at a limit; unset messages are entered as well."""
    for path, name, value in _changes(base, depth=_DEPTH):
        changed = type(base)()
        changed.CopyFrom(base)
        _apply(changed, path, value)
        yield name, changed


def extremes(base: Message, decode: Callable[[Message], object]) -> Iterator[Message]:
    """Versions of `base`, each with one number at the highest value that `decode` accepts."""
    for path, values in _numbers(base).items():
        raised = _raised(base, path, values, decode)
        if raised is not None:
            yield raised


def highest(
    base: Message, decode: Callable[[Message], object], *, kept: Collection[str]
) -> Message:
    """`base` with all numbers at the highest values that are accepted, except the fields `kept`."""
    found = base
    for path, values in _numbers(base).items():
        if path[-1] not in kept:
            found = _raised(found, path, values, decode) or found
    return found


def _numbers(base: Message) -> dict[tuple[str, ...], list[float]]:
    """Values of each number in `base`, by its path, the highest first."""
    values: dict[tuple[str, ...], list[float]] = {}
    for path, _, value in _changes(base, depth=_DEPTH):
        if type(value) in {int, float} and not math.isnan(value):
            values.setdefault(path, []).append(value)
    return {path: sorted(known, reverse=True) for path, known in values.items()}


def _raised(
    base: Message,
    path: tuple[str, ...],
    values: Iterable[float],
    decode: Callable[[Message], object],
) -> Message | None:
    for value in values:
        changed = type(base)()
        changed.CopyFrom(base)
        _apply(changed, path, value)
        with suppress(InvalidMessageError):
            decode(changed)
            return changed
    return None


def field_names(descriptor: Descriptor, *, prefix: str = "", depth: int = _DEPTH) -> set[str]:
    """Dotted names of all fields of a message and of those in it."""
    names = set()
    for field in descriptor.fields:
        name = f"{prefix}{field.name}"
        names.add(name)
        if field.message_type is not None and depth:
            names |= field_names(field.message_type, prefix=f"{name}.", depth=depth - 1)
    return names


def long_name(mark, number):
    """A name as long as a name may be."""
    return f"{mark * (MAX_NAME_BYTES - 5)}{number:05}"


def largest_join_epoch(*, num_ranks, num_layers):
    """A Hello and the JoinEpoch of its rank, in a pool with as many slots as there may be.

    All names are as long as they may be, and each own slot gets an expert that all ranks hold.
    """
    slots = MAX_CELLS // num_layers
    own, last = slots // num_ranks, num_ranks - 1
    table = np.tile(np.arange(slots, dtype=np.int32) % own, (num_layers, 1))
    hello = make_hello(
        long_name("w", last),
        model=ModelShape(num_layers=num_layers, num_experts=own, num_groups=1, expert_bytes=1),
        slots_per_rank=own,
        num_ranks=num_ranks,
    )
    sources = (*(RankSource(rank=rank) for rank in range(num_ranks)), CheckpointSource())
    message = JoinEpoch(
        epoch=MAX_COUNT,
        rank=last,
        peers=tuple(
            Peer(
                rank=rank,
                address=f"{long_name('a', rank)}:65535",
                node=long_name("n", rank),
                worker=long_name("w", rank),
            )
            for rank in range(num_ranks)
        ),
        rendezvous_address=f"{long_name('a', 0)}:65535",
        layout=Layout(
            generation=MAX_COUNT,
            num_experts=own,
            num_ranks=num_ranks,
            expert_of_slot=table,
            share_of_slot=np.full_like(table, WHOLE_SHARE // num_ranks),
        ),
        report_interval_s=1.0,
        heartbeat_interval_s=1.0,
        term=MAX_TERM,
        moves=tuple(
            Move(
                layer=layer,
                slot=slot,
                expert=int(table[layer, slot]),
                checksum=bytes(16),
                sources=sources,
            )
            for layer in range(num_layers)
            for slot in range(slots - own, slots)
        ),
    )
    return hello, message


def assert_one_line(text, name=""):
    """What every reason promises: one printable line of bounded length."""
    assert len(text) < 1500, (name, len(text))
    assert text.isprintable(), (name, text[:300])


def assert_bounded(value, name=""):
    """What every decoded value promises: short printable texts, numbers within their bounds."""
    match value:
        case str():
            assert value.isprintable(), name
            assert len(value) <= 1000, name
        case int():
            assert 0 <= value <= 2**53, name
        case float():
            assert math.isfinite(value), name
        case tuple() | list() | frozenset():
            for one in value:
                assert_bounded(one, name)
        case dict():
            assert_bounded((*value, *value.values()), name)
        case _ if is_dataclass(value):
            for field in fields(value):
                assert_bounded(getattr(value, field.name), name)


def _changes(message: Message, *, depth: int, prefix: str = "") -> Iterator[tuple]:
    """(path of field names, name of the variant, value) for each field of `message`."""
    for field in message.DESCRIPTOR.fields:
        name = f"{prefix}{field.name}"
        present = getattr(message, field.name)
        if is_map(field):
            yield from _map_changes(field, present, name)
            continue
        if field.is_repeated:
            yield from _list_changes(field, present, name)
            inner = present[0] if present else None
        else:
            inner = present
            for what, value in _values(field, present):
                yield (field.name,), f"{name}={what}", value
        if field.message_type is not None and depth:
            if inner is None:
                inner = field.message_type._concrete_class()
            for path, named, value in _changes(inner, depth=depth - 1, prefix=f"{name}."):
                yield (field.name, *path), named, value


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _map_changes(field: FieldDescriptor, present: dict, name: str) -> Iterator[tuple]:
    """Maps of scalars, which are all that the contract has."""
    key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
    as_key = str if key.cpp_type == FieldDescriptor.CPPTYPE_STRING else int
    known = dict(present) or {as_key(1): next(_values(value, None))[1]}
    one = next(iter(known.values()))
    yield (field.name,), f"{name}={{}}", {}
    for what, text in _values(key, None):
        yield (field.name,), f"{name}.key={what}", {text: one}
    for what, number in _values(value, one):
        yield (field.name,), f"{name}.value={what}", dict.fromkeys(known, number)
    yield (field.name,), f"{name}=many", {as_key(number): one for number in range(MANY)}


def _list_changes(field: FieldDescriptor, present: Iterable, name: str) -> Iterator[tuple]:
    items = list(present)
    yield (field.name,), f"{name}=[]", []
    yield (field.name,), f"{name}=twice", items * 2
    yield (field.name,), f"{name}=shorter", items[:-1]
    if field.message_type is not None:
        empty = field.message_type._concrete_class()
        yield (field.name,), f"{name}=[empty]", [empty]
        yield (field.name,), f"{name}=many", (items[:1] or [empty]) * MANY
        return
    for what, value in _values(field, None):
        yield (field.name,), f"{name}=[{what}]", [value]
        yield (field.name,), f"{name}=one is {what}", [value, *items[1:]]
    ((_, last),) = list(_values(field, None))[-1:]
    yield (field.name,), f"{name}=many", (items[:1] or [last]) * MANY


def _values(  # noqa: C901 - a case per type
    field: FieldDescriptor, now: object
) -> Iterator[tuple[str, object]]:
    """Values of a field that is not a list, with their names; None means unset."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            yield "unset", None
            yield "empty", field.message_type._concrete_class()
        case FieldDescriptor.CPPTYPE_BOOL:
            yield str(not now), not now
        case FieldDescriptor.CPPTYPE_ENUM:
            known = max(value.number for value in field.enum_type.values)
            for number in (0, known, known + 1, -1, 2**31 - 1):
                yield str(number), number
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            for number in FLOATS:
                yield str(number), number
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            yield from BYTES.items()
            if isinstance(now, bytes) and now:
                yield "zeros", bytes(len(now))
                yield "ones", b"\xff" * len(now)
                yield "shorter", now[:-1]
        case FieldDescriptor.CPPTYPE_STRING:
            yield from TEXTS.items()
        case kind:
            low, high = RANGES[kind]
            near = (int(now or 0) - 1, int(now or 0) + 1)
            for number in sorted({*WIDE, *NEGATIVE, *near}):
                if low <= number <= high:
                    yield str(number), number


def _apply(message: Message, path: tuple[str, ...], value: object) -> None:
    first, *rest = path
    field = message.DESCRIPTOR.fields_by_name[first]
    if rest:
        inner = getattr(message, first)
        if field.is_repeated:
            inner = inner[0] if inner else inner.add()
        else:
            inner.SetInParent()
        _apply(inner, tuple(rest), value)
    elif is_map(field):
        message.ClearField(first)
        getattr(message, first).update(value)
    elif field.is_repeated:
        message.ClearField(first)
        getattr(message, first).extend(value)
    elif field.message_type is None:
        setattr(message, first, value)
    else:
        message.ClearField(first)
        if value is not None:
            getattr(message, first).SetInParent()

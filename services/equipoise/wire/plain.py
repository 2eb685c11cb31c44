"""Status messages as plain values, for JSON."""

import math
import re
from typing import Any

from google.protobuf.message import Message


def as_json(message: Message) -> dict[str, Any]:
    """Convert a message: every field is present, numbers are numbers, enums are lower-case names.

    Absent optional messages are None. (Protobuf's own JSON writes 64-bit numbers as strings.)
    """
    return {field.name: _field_as_json(message, field) for field in message.DESCRIPTOR.fields}


def _field_as_json(message: Message, field: Any) -> Any:
    # `field` is a FieldDescriptor; protobuf has two unrelated types of them.
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value_as_json(one, field) for one in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value_as_json(value, field)


def _value_as_json(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return _enum_word(field.enum_type, value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # not representable in JSON
    return value


def _enum_word(enum: Any, number: int) -> str:
    """The name of an enum value: POOL_HEALTH_SERVING of PoolHealth gives "serving"."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
    return str(known.name).removeprefix(f"{prefix}_").lower()

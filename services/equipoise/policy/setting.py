"""`Setting`: one value of a policy file, and the value of `Policy` that it is.

Defaults and ranges stand in `planning/policy.py` only; here is how people write them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from equipoise.planning.policy import RANGES, Policy
from equipoise.policy.quantities import (
    BYTES_PATTERN,
    DURATION_PATTERN,
    read_bytes,
    read_seconds,
    write_bytes,
    write_seconds,
)

DEFAULTS = Policy()


@dataclass(frozen=True, slots=True)
class Setting:
    """How `Policy.name` is read, written and described to editors. Used as an annotation."""

    name: str
    unit: str
    read: Callable[[object], Any] = field(repr=False)
    write: Callable[[Any], Any] = field(repr=False)
    json_schema: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        assert self.name in {one.name for one in fields(Policy)}, "a setting is one of Policy's"

    @property
    def default(self) -> Any:
        """The default as people would write it."""
        return self.write(getattr(DEFAULTS, self.name))

    @property
    def range(self) -> str:
        """The values that are taken, in words."""
        if self.name not in RANGES:
            return ", ".join(str(one) for one in self.json_schema.get("enum", ("true", "false")))
        low, high = RANGES[self.name]
        return f"{self.write(low)} to {self.write(high)}"

    def checked(self, value: object) -> Any:
        """The value of `Policy` that `value` of a file stands for.

        Raises:
            ValueError: it cannot be understood, or is outside the range.
        """
        understood = self.read(value)
        if self.name in RANGES:
            low, high = RANGES[self.name]
            if not low <= understood <= high:
                raise ValueError(f"must be from {self.write(low)} to {self.write(high)}")
        return understood

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Pydantic's hook for how a value is read and written."""
        del source, handler
        return core_schema.no_info_plain_validator_function(
            self.checked,
            serialization=core_schema.plain_serializer_function_ser_schema(self.write),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Pydantic's hook for what editors are told."""
        del schema, handler
        bounds: dict[str, Any] = {}
        if self.name in RANGES and self.json_schema.get("type") in {"number", "integer"}:
            bounds["minimum"], bounds["maximum"] = RANGES[self.name]
        return {**self.json_schema, **bounds}


def seconds(name: str) -> Setting:
    """A duration with its unit."""
    schema = {"type": "string", "pattern": DURATION_PATTERN}
    return Setting(name, "duration", read_seconds, write_seconds, schema)


def quantity(name: str) -> Setting:
    """A number of bytes."""
    schema = {"anyOf": [{"type": "string", "pattern": BYTES_PATTERN}, {"type": "integer"}]}
    return Setting(name, "bytes", read_bytes, write_bytes, schema)


def number(name: str, unit: str) -> Setting:
    """A plain number; `unit` says of what."""
    return Setting(name, unit, _read_number, _write_number, {"type": "number"})


def count(name: str, unit: str) -> Setting:
    """A whole number; `unit` says of what."""
    return Setting(name, unit, _read_count, int, {"type": "integer"})


def choice(name: str, kind: type[StrEnum]) -> Setting:
    """One of a few words."""
    words = [one.value for one in kind]

    def read(value: object) -> StrEnum:
        # YAML takes a bare on or off for a boolean.
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        if word not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return kind(str(word))

    return Setting(name, "word", read, str, {"type": "string", "enum": words})


def switch(name: str) -> Setting:
    """True or false."""
    return Setting(name, "true or false", _read_switch, bool, {"type": "boolean"})


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic wants a ValueError
    return float(value)


def _write_number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")  # noqa: TRY004
    return value


def _read_switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004
    return value

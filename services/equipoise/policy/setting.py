"""`Setting`: one value of `Policy` in the form that a policy file has it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, get_type_hints

from equipoise.planning.policy import Key, Policy
from equipoise.policy.quantities import (
    BYTES_PATTERN,
    DURATION_PATTERN,
    read_bytes,
    read_seconds,
    write_bytes,
    write_seconds,
)
from equipoise.settings.fields import Range, explanations, ranges_of


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind of value is written in a policy file."""

    unit: str
    """Unit, for the docs."""

    read: Callable[[object], Any]
    """From the file's value to the policy's. Raises ValueError if it has another form."""

    write: Callable[[Any], Any]
    """From the policy's value to the file's."""

    json_schema: Mapping[str, Any]
    """JSON Schema of the file's value, without a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of `Policy`, and its form in a policy file."""

    name: str
    """Field of `Policy`."""

    path: str
    """Key in a policy file, preceded by its section and a dot if it is in one."""

    explanation: str
    """What the value does and when to change it."""

    form: Form = field(repr=False)
    """How the file writes it."""

    range: Range | None
    """Valid numbers; None for words and switches."""

    initial: Any
    """The policy's default."""

    @property
    def option(self) -> str:
        """The balancer's option for this value; a duration in seconds."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def default(self) -> Any:
        """The default as a policy file writes it."""
        return self.form.write(self.initial)

    @property
    def valid(self) -> str:
        """The valid values, human-readable."""
        if self.range is None:
            return ", ".join(map(str, self.form.json_schema.get("enum", ("true", "false"))))
        return f"{self.form.write(self.range.low)} to {self.form.write(self.range.high)}"

    def checked(self, value: object) -> Any:
        """The policy's value for a value in a file.

        Raises:
            ValueError: it has the wrong form, or is out of range.
        """
        number = self.form.read(value)
        if self.range is not None and number not in self.range:
            raise ValueError(f"must be from {self.valid}")
        return number

    @property
    def json_schema(self) -> dict[str, Any]:
        """JSON Schema of the file's value, with the range of a plain number."""
        if self.range is None or self.form.unit in {"bytes", "duration"}:
            return dict(self.form.json_schema)
        return {**self.form.json_schema, "minimum": self.range.low, "maximum": self.range.high}


def _form(name: str, kind: type, unit: str) -> Form:
    if issubclass(kind, StrEnum):
        words = [one.value for one in kind]
        return Form("word", _word_reader(kind), str, {"type": "string", "enum": words})
    if kind is bool:
        return Form("true or false", _read_switch, bool, {"type": "boolean"})
    if "bytes" in name:
        schema = {"anyOf": [{"type": "string", "pattern": BYTES_PATTERN}, {"type": "integer"}]}
        return Form("bytes", read_bytes, write_bytes, schema)
    if name.endswith("_s"):
        duration = {"type": "string", "pattern": DURATION_PATTERN}
        return Form("duration", read_seconds, write_seconds, duration)
    if kind is int:
        return Form(unit, _read_count, int, {"type": "integer"})
    return Form(unit, _read_number, _write_number, {"type": "number"})


def _word_reader(kind: type[StrEnum]) -> Callable[[object], StrEnum]:
    def read(value: object) -> StrEnum:
        # YAML reads a bare on or off as a boolean.
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        if word not in list(kind):
            raise ValueError(f"must be one of {', '.join(kind)}")
        return kind(str(word))

    return read


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic expects a ValueError
    try:
        return float(value)
    except OverflowError:
        raise ValueError("must be a number of at most 308 digits") from None


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


def _settings() -> tuple[Setting, ...]:
    hints = get_type_hints(Policy, include_extras=True)
    texts, ranges = explanations(Policy), ranges_of(Policy)
    found = []
    for one in fields(Policy):
        (key,) = (extra for extra in hints[one.name].__metadata__ if isinstance(extra, Key))
        found.append(
            Setting(
                name=one.name,
                path=key.path,
                explanation=texts[one.name],
                form=_form(one.name, hints[one.name].__origin__, key.unit),
                range=ranges.get(one.name),
                initial=one.default,
            )
        )
    return tuple(found)


SETTINGS = _settings()
"""Every value of a policy, in the order of the file."""

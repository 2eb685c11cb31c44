"""`Fields`: a client's JSON object, read field by field; errors name the field.

Knows JSON and ranges, not what the fields mean.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from equipoise.gateway.errors import InvalidRequestError

MAX_DEPTH = 256
"""Levels of lists and objects in a body; with more, Python could not write its parts again."""


class Fields:
    """The fields of an object. A null field counts as missing.

    `path` precedes names in messages, as in `messages[2].`.
    """

    def __init__(self, values: Mapping[str, Any], *, path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path

    @classmethod
    def of_body(cls, body: bytes) -> "Fields":
        """Parse a request's body; all its numbers are finite.

        Raises:
            InvalidRequestError: it is not a JSON object.
        """
        try:
            document = json.loads(body, parse_float=_finite, parse_constant=_reject_constant)
        except (ValueError, RecursionError):
            raise InvalidRequestError("the body is not valid JSON") from None
        if not isinstance(document, dict):
            raise InvalidRequestError("the body must be a JSON object")
        if not _is_readable(document):
            raise InvalidRequestError(f"the body must have at most {MAX_DEPTH} levels of nesting")
        return cls(document)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """The value as received; None if it is missing."""
        return self._values.get(name)

    def only(self, known: Collection[str]) -> None:
        """Raise InvalidRequestError if there is a field of another name."""
        for name in self._values:
            if name not in known:
                raise InvalidRequestError(
                    f"unknown field {shown(self._path + name)}", param=self._path + name
                )

    def reject(self, name: str, why: str) -> InvalidRequestError:
        """The error to raise for a field."""
        return InvalidRequestError(f"{self._path}{name} {why}", param=self._path + name)

    def flag(self, name: str) -> bool:
        """True or false; false if it is missing."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise self.reject(name, f"must be true or false, not {shown(value)}")
        return value

    def whole(self, name: str, *, least: int, most: int, default: int) -> int:
        """A whole number within a range."""
        value = self._values.get(name, default)
        if not is_whole(value) or not least <= value <= most:
            raise self.reject(
                name, f"must be a whole number from {least} to {most}, not {shown(value)}"
            )
        return int(value)

    def number(self, name: str, *, least: float, most: float, default: float) -> float:
        """A finite number within a range."""
        value = self._values.get(name, default)
        is_number = isinstance(value, float) or is_whole(value)
        # Integers of any length compare with floats.
        if not is_number or not least <= value <= most:
            raise self.reject(
                name, f"must be a number from {least:g} to {most:g}, not {shown(value)}"
            )
        return float(value)


def _is_readable(document: dict[str, Any]) -> bool:
    """Whether a document has at most `MAX_DEPTH` levels of nesting."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return not level


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InvalidRequestError(f"the body has the number {_short(text)}, which is too large")
    return value


def _reject_constant(name: str) -> NoReturn:
    """Python's parser reads NaN, Infinity and -Infinity, which JSON does not have."""
    raise InvalidRequestError(f"the body is not valid JSON: it has {name} for a number")


def is_whole(value: Any) -> bool:
    """Whether a JSON value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A client's value, short enough for a message."""
    return _short(json.dumps(value))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"

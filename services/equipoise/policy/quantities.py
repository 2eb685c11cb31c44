"""Durations and bytes with units: `10s`, `250ms`, `256Mi`. Durations need a unit."""

import math
import re

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"

_SECONDS_OF_UNIT = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_BYTES_OF_UNIT = {
    "Ti": 2**40,
    "Gi": 2**30,
    "Mi": 2**20,
    "Ki": 2**10,
    "T": 10**12,
    "G": 10**9,
    "M": 10**6,
    "k": 10**3,
    "": 1,
}
_MOST_CHARACTERS = 32


def read_seconds(value: object) -> float:
    """Parse a duration such as `10s`, `250ms` or `1h30m`; returns seconds.

    Raises:
        ValueError: it is not a duration.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"a duration needs a unit: write {value}s, {value}m or {value}ms")  # noqa: TRY004
    if not isinstance(value, str) or not _matches(DURATION_PATTERN, value):
        raise ValueError("must be a duration such as 10s, 250ms or 1h30m")
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", value)
    return math.fsum(float(number) * _SECONDS_OF_UNIT[unit] for number, unit in parts)


def write_seconds(seconds: float) -> str:
    """The duration in the largest unit that gives a whole number."""
    for unit, length in _SECONDS_OF_UNIT.items():
        text = f"{seconds / length:.0f}{unit}"
        if seconds >= length and read_seconds(text) == seconds:
            return text
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def read_bytes(value: object) -> int:
    """Parse a number of bytes such as `256Mi`, `1G` or a whole number.

    Raises:
        ValueError: it is not a number of bytes.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _matches(BYTES_PATTERN, text):
        raise ValueError("must be a number of bytes such as 256Mi, 1G or 1048576")
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", text).groups()  # type: ignore[union-attr]
    return (
        round(float(number) * _BYTES_OF_UNIT[unit])
        if "." in number
        else (int(number) * _BYTES_OF_UNIT[unit])
    )


def write_bytes(number: float) -> str:
    """The bytes in the largest unit that gives a whole number; fractions are dropped."""
    whole = int(number)
    fitting = (
        f"{whole // length}{unit}"
        for unit, length in _BYTES_OF_UNIT.items()
        if whole >= length and whole % length == 0
    )
    return next(fitting, str(whole))


def _matches(pattern: str, text: str) -> bool:
    return len(text) <= _MOST_CHARACTERS and re.match(pattern, text) is not None

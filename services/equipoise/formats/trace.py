"""Profiler traces: Chrome's trace event format, as PyTorch's profiler writes it (.json, .json.gz).

Events are read one by one, because real traces have gigabytes. Only complete events ("ph": "X") are
slices of time; others are skipped. Times are microseconds, possibly with a fraction.
"""

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from equipoise.formats.errors import FormatError, naming
from equipoise.formats.json_stream import array_items

EVENTS_KEY = "traceEvents"
MAX_TIME_US = 2.0**53
"""Times beyond this are no microseconds: it is 285 years."""

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_NAME_CHARS = 4096
_MAX_LABEL_CHARS = 200


class Slice(NamedTuple):
    """A stretch of time in which one thread or stream did something."""

    category: str
    """Kind of event in lower case, such as kernel or cpu_op; "" if there is none."""
    name: str
    """What it did; cut at 4,096 characters."""
    process: str
    """Process, or device of a kernel: printable, at most 200 characters and a digest."""
    track: str
    """Thread, or stream of a kernel: likewise."""
    start_ns: int
    end_ns: int


def read_slices(path: Path) -> Iterator[Slice]:
    """Yield the slices of a trace in the order of the file, which need not be that of time.

    Raises:
        FormatError: the file cannot be read, is cut short, is no trace, or an event is invalid; the
            message names the file.
    """
    with naming(path):
        num_events = num_slices = 0
        with path.open("rb") as raw:
            for event in _events(raw):
                slice_ = _slice(event, num_events)
                num_events += 1
                if slice_ is not None:
                    num_slices += 1
                    yield slice_
        if not num_events:
            raise FormatError("it has no events: profile at least one step")
        if not num_slices:
            raise FormatError(
                f"none of its {num_events:,} events is a complete one (ph X): export it as "
                "PyTorch's profiler does"
            )


def _events(raw: BinaryIO) -> Iterator[Any]:
    is_packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    # Names of kernels may contain bytes that are not UTF-8.
    as_text = partial(io.TextIOWrapper, encoding="utf-8-sig", errors="replace")
    try:
        with as_text(gzip.GzipFile(fileobj=raw)) if is_packed else as_text(raw) as text:
            yield from array_items(text, key=EVENTS_KEY)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"its gzip data is cut short or damaged: {error}") from None


def _slice(event: Any, number: int) -> Slice | None:
    """Return the event's slice; None if it is of another kind."""
    if not isinstance(event, dict):
        raise FormatError(f"event {number} is not an object")
    if event.get("ph") != "X":
        return None
    name = str(event.get("name", ""))[:_MAX_NAME_CHARS]
    start_ns = _time_ns(event, "ts", number, name)
    duration_ns = _time_ns(event, "dur", number, name)
    if duration_ns < 0:
        raise FormatError(
            f"event {number}, {name[:60]!r}, ends before it begins (dur {event['dur']}): its clock "
            "went back; profile again"
        )
    return Slice(
        category=str(event.get("cat", "")).lower()[:_MAX_NAME_CHARS],
        name=name,
        process=_label(event.get("pid", "")),
        track=_label(event.get("tid", "")),
        start_ns=start_ns,
        end_ns=start_ns + duration_ns,
    )


def _label(value: Any) -> str:
    """Return text to show; what is long or does not print is told apart by a digest."""
    text = str(value)
    if len(text) <= _MAX_LABEL_CHARS and text.isprintable():
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    escaped = repr(text[:_MAX_LABEL_CHARS])[1:-1]
    return f"{escaped[:_MAX_LABEL_CHARS]} #{digest}"


def _time_ns(event: dict[str, Any], key: str, number: int, name: str) -> int:
    """Return a time in nanoseconds, exactly unless the file's number is coarser."""
    value = event.get(key, 0 if key == "dur" else None)
    if (type(value) is not int and type(value) is not float) or value != value:  # noqa: PLR0124
        raise FormatError(
            f"event {number}, {name[:60]!r}, has no number of microseconds as {key}: "
            f"{str(value)[:40]!r}"
        )
    if abs(value) > MAX_TIME_US:
        raise FormatError(
            f"event {number}, {name[:60]!r}, has {key} {str(value)[:20]}, more than 285 "
            "years of microseconds"
        )
    whole = int(value)
    return whole * 1000 + round((value - whole) * 1000)

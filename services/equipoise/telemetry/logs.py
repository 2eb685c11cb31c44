"""Logs of a process: human-readable text, or one JSON object per line.

A log call adds fields with `extra=about(pool=..., generation=...)`. Fields of the whole process
(its pool, its current rank and epoch) come from `context`, which is called for every line.
Characters that do not print are escaped, so that text from peers cannot forge lines.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

FIELDS = (
    "pool",
    "worker",
    "rank",
    "epoch",
    "generation",
    "term",
    "request",
    "bytes_done",
    "bytes_total",
)
"""Names of the fields that `about` accepts."""

MOST_CAUSES = 1000
"""Causes whose events are counted at a time."""

_log = logging.getLogger(__name__)

LogContext = Callable[[], Mapping[str, str | int]]


class LogFormat(StrEnum):
    """Format of log lines."""

    TEXT = "text"
    """Human-readable."""

    JSON = "json"
    """One object per line: time, level, logger, message, and the fields that apply."""


def configure_logs(
    log_format: LogFormat,
    *,
    level: int = logging.INFO,
    context: LogContext | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send this process's logs to `stream` (default: stderr), unless logging is set up already."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(context or dict) if log_format is LogFormat.JSON else _Plain())
    handler.addFilter(_UvicornByCause())
    logging.basicConfig(level=level, handlers=[handler])


def about(**fields: str | int | None) -> dict[str, Any]:
    """The `extra` of a log call, with fields of `FIELDS`; those that are None are left out."""
    assert fields.keys() <= set(FIELDS), f"{sorted(fields)} must be among {FIELDS}"
    return {"about": {name: value for name, value in fields.items() if value is not None}}


def is_worth_logging(count: int) -> bool:
    """Whether to log the `count`-th occurrence of a repeated event: the 1st, 2nd, 4th, 8th..."""
    return count.bit_count() == 1


class Causes:
    """Counts repeated events by cause; of many causes, it forgets the one not seen for longest."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def count(self, cause: str) -> int:
        """Count an event; returns how many its cause has had if it is worth logging, else 0."""
        number = self._counts.pop(cause, 0) + 1
        self._counts[cause] = number
        if len(self._counts) > MOST_CAUSES:
            del self._counts[next(iter(self._counts))]
        return number if is_worth_logging(number) else 0


def log_causes_once(loop: asyncio.AbstractEventLoop) -> None:
    """Log unhandled errors of the loop by cause: the 1st, 2nd, 4th... with its number.

    asyncio logs a traceback for each, for example for every connection that it cannot accept.
    """
    causes = Causes()

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message, error = str(context.get("message", "")), context.get("exception")
        if number := causes.count(f"{message}: {type(error).__name__}"):
            _log.error(
                "%s: %s (%d so far)",
                *(message, error, number),
                exc_info=error if number == 1 else None,
            )

    loop.set_exception_handler(handle)


def printable(text: str) -> str:
    """The text with line breaks, control and format characters escaped, as in a string literal."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class _UvicornByCause(logging.Filter):
    """Passes the 1st, 2nd, 4th... of uvicorn's lines of a cause: clients can provoke them."""

    def __init__(self) -> None:
        super().__init__("uvicorn")
        self._causes = Causes()

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True  # Not uvicorn's.
        error = record.exc_info[0] if record.exc_info else None
        number = self._causes.count(f"{record.getMessage()} {error}")
        record.msg, record.args = f"{record.getMessage()} ({number} so far)", ()
        return number > 0


class _Plain(logging.Formatter):
    """Continuation lines of tracebacks are indented; every other line is a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {printable(line)}" for line in lines)


class _Json(logging.Formatter):
    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._context(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)

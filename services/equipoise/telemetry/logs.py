"""Logs of a process: for people, or one JSON object a line for programs.

Whoever logs adds what it is about with `extra=about(pool=..., generation=...)`; what is true of the
whole process (its pool, its present rank and epoch) is asked for by `context` at every line.
"""

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
"""What a line may be about."""

Context = Callable[[], Mapping[str, str | int]]


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    """For people."""

    JSON = "json"
    """One object a line: time, level, logger, message, and the fields that apply."""


def configure_logs(
    log_format: LogFormat,
    *,
    level: int = logging.INFO,
    context: Context | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send this process's logs to `stream` (stderr unless given), if they go nowhere yet."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(context or dict) if log_format is LogFormat.JSON else _text())
    logging.basicConfig(level=level, handlers=[handler])


def about(**fields: str | int | None) -> dict[str, Any]:
    """`extra` of a log call: what the line is about, by `FIELDS`; None is left out."""
    assert fields.keys() <= set(FIELDS), f"{sorted(fields)} must be among {FIELDS}"
    return {"about": {name: value for name, value in fields.items() if value is not None}}


class _Json(logging.Formatter):
    def __init__(self, context: Context) -> None:
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
        return json.dumps(line, ensure_ascii=False, default=str)


def _text() -> logging.Formatter:
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")

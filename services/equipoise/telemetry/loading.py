"""`Loading`: how far reading a checkpoint has come, for whoever waits for it.

At a terminal it is a bar that goes away when it is full. Elsewhere it is lines: one now and then
with a percentage, and one at the end; a program that reads logs gets bytes and seconds as fields.
Knows nothing of checkpoints; must not slow down what it watches.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from equipoise.telemetry.logs import LogFormat, about

LINES_EVERY_S = 5.0
"""Seconds between two lines, at least: hours of loading shall not fill a log."""

Told = Callable[[int, int], None]
"""Told the bytes that are done, and all that there are."""

Say = Callable[[str, int, int], None]
"""Says a line to people, with the bytes that are done and all that there are."""

_log = logging.getLogger(__name__)


class Loading:
    """Tells of one thing after the other that is read; used from any thread, one at a time.

    Args:
        log_format: `json` never draws.
        stream: where a bar is drawn if it is a terminal; stderr unless given.
        say: takes the lines where there is no bar; the log unless given.
        clock: seconds from any start.
    """

    def __init__(
        self,
        *,
        log_format: LogFormat = LogFormat.TEXT,
        stream: TextIO | None = None,
        say: Say | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(file=stream or sys.stderr)
        self._draws = log_format is LogFormat.TEXT and self._console.is_terminal
        self._say = say or _log_line
        self._clock = clock

    @contextmanager
    def of(self, what: str) -> Iterator[Told]:
        """Tell of `what` until the block is left; what the block gets is called as bytes come."""
        if self._draws:
            with self._bar() as bar:
                task = bar.add_task(f"loading {what}", total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)
        else:
            yield _Lines(what, say=self._say, clock=self._clock)

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )


class _Lines:
    """A line every `LINES_EVERY_S` at most, and one when all is done."""

    def __init__(self, what: str, *, say: Say, clock: Callable[[], float]) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._began_s = self._last_s = clock()

    def __call__(self, done: int, total: int) -> None:
        now_s = self._clock()
        if done >= total:
            took_s = now_s - self._began_s
            self._say(
                f"loaded {self._what}: {total / 2**20:,.1f} MiB in {took_s:.1f} s", done, total
            )
        elif now_s - self._last_s >= LINES_EVERY_S:
            self._last_s = now_s
            percent = 100 * done // total
            self._say(f"loading {self._what}: {percent} % of {total / 2**20:,.1f} MiB", done, total)


def _log_line(line: str, done: int, total: int) -> None:
    _log.info("%s", line, extra=about(bytes_done=done, bytes_total=total))

"""`Loading`: progress of reading a checkpoint.

A terminal shows a progress bar that disappears when done. Otherwise log lines show a percentage
every few seconds and a summary at the end; JSON logs carry the bytes as fields. Knows nothing about
checkpoints, and must not slow the reading down.
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

from equipoise.settings.numbers import format_bytes
from equipoise.telemetry.logs import LogFormat, about

LINES_EVERY_S = 5.0
"""Minimum seconds between two lines, so that hours of loading do not flood the log."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the total bytes."""

Say = Callable[[str, int, int], None]
"""Writes a line, given its text, the bytes read so far and the total bytes."""

_log = logging.getLogger(__name__)


class Loading:
    """Shows the progress of one read after another; usable from any thread, one at a time.

    Args:
        log_format: `json` never draws a bar.
        stream: where to draw a bar if it is a terminal; default: stderr.
        say: writes the lines if there is no bar; default: the log.
        clock: a monotonic clock in seconds.
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
        self.reached: tuple[str, int] = ("", 0)
        """What is being read, and the bytes of it so far; empty if nothing is."""

    @contextmanager
    def of(self, what: str) -> Iterator[OnProgress]:
        """Show the progress of `what` inside the block, which calls the yielded function."""
        self.reached = (what, 0)
        try:
            with self._shown(what) as show:

                def note(done: int, total: int) -> None:
                    self.reached = (what, done)
                    show(done, total)

                yield note
        finally:
            self.reached = ("", 0)

    @contextmanager
    def _shown(self, what: str) -> Iterator[OnProgress]:
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
    """Writes at most one line per `LINES_EVERY_S`, and one at the end."""

    def __init__(self, what: str, *, say: Say, clock: Callable[[], float]) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._began_s = self._last_s = clock()

    def __call__(self, done: int, total: int) -> None:
        now_s = self._clock()
        if done >= total:
            took_s = now_s - self._began_s
            self._say(f"loaded {self._what}: {format_bytes(total)} in {took_s:.1f} s", done, total)
        elif now_s - self._last_s >= LINES_EVERY_S:
            self._last_s = now_s
            percent = 100 * done // total
            self._say(f"loading {self._what}: {percent} % of {format_bytes(total)}", done, total)


def _log_line(line: str, done: int, total: int) -> None:
    _log.info("%s", line, extra=about(bytes_done=done, bytes_total=total))

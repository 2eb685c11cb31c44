"""How tables and lines show counts, times and text."""

import io
import json
import sys
from datetime import datetime

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

NO_DATA = "no data"
"""In place of a measure of nothing."""

_PIPE_WIDTH = 2000
"""Columns of a pipe: no name and no reason is folded."""


def format_count(number: int, noun: str) -> str:
    """A number of things: "1 node", "2 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_time(unix_s: float) -> str:
    """Local time; with the date unless it is today's."""
    at = datetime.fromtimestamp(unix_s).astimezone()
    today = datetime.now().astimezone().date()
    return at.strftime("%H:%M:%S" if at.date() == today else "%Y-%m-%d %H:%M:%S")


def print_json(document: object) -> None:
    """Print a document as indented JSON."""
    print(json.dumps(document, indent=2))


def print_fault(fault: str) -> None:
    """Print to stderr, at once, why a command that goes on has nothing new."""
    print(fault, file=sys.stderr, flush=True)


def console(*, stderr: bool = False) -> Console:
    """A console without markup, because names in files and messages may look like markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def print_view(view: RenderableType) -> None:
    """Print a view; into a pipe with whole lines, which programs can search."""
    screen = console()
    if screen.is_terminal:
        screen.print(view)
        return
    wide = Console(
        file=io.StringIO(), width=_PIPE_WIDTH, markup=False, highlight=False, emoji=False
    )
    with wide.capture() as caught:
        wide.print(view)
    print(*(line.rstrip() for line in caught.get().splitlines()), sep="\n")


def print_whole(table: Table) -> None:
    """Print a table of figures; a terminal that is too narrow wraps lines but loses no figure."""
    wide = Console(width=_PIPE_WIDTH, markup=False, highlight=False, emoji=False)
    needed = wide.measure(table).maximum
    screen = console()
    screen.width = max(screen.width, needed)
    screen.print(table)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr that disappears when done; hidden unless stderr is a terminal."""
    screen = console(stderr=True)
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), *columns),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )

"""How tables and lines show bytes, times and text."""

import json
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """A size with a binary unit: 1536 is "1.5 KiB"."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


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


def console(*, stderr: bool = False) -> Console:
    """A console without markup, because names in files and messages may look like markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr that disappears when done; hidden unless stderr is a terminal."""
    screen = console(stderr=True)
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), *columns),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )

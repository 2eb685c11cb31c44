"""Numbers as people read them. Shared by the tools' tables."""

from datetime import datetime

from rich.console import Console

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_words(count: float) -> str:
    """1536 is "1.5 KiB"."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def console(*, stderr: bool = False) -> Console:
    """A console that marks nothing up: what it prints comes from files too."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def clock_words(unix_s: float) -> str:
    """Local time, with the date if it was not today."""
    at = datetime.fromtimestamp(unix_s).astimezone()
    today = datetime.now().astimezone().date()
    return at.strftime("%H:%M:%S" if at.date() == today else "%Y-%m-%d %H:%M:%S")

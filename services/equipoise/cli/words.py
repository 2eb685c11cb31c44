"""Numbers as people read them. Shared by the tools' tables."""

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

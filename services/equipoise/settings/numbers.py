"""Numbers as text."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """A size with a binary unit: 1536 is "1.5 KiB"."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def format_number(value: float, *, digits: int = 3) -> str:
    """A number with so many significant digits, and never an exponent: 1234.5 is "1,230"."""
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    return f"{float(text):,.0f}" if abs(value) >= 1 else f"{float(text):.15f}".rstrip("0")

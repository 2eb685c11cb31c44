"""Errors about files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FormatError(ValueError):
    """A file that cannot be used; the message names the file, layer, value and remedy."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefix errors with the name of the file, if they do not begin with it.

    Raises:
        FormatError: for any FormatError or OSError within.
    """
    try:
        yield
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except FormatError as error:
        named = str(error).startswith(f"{path}: ")
        raise FormatError(str(error) if named else f"{path}: {error}") from None

"""Errors about files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FormatError(ValueError):
    """A file that cannot be used; the message names the file, layer, value and remedy."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefix errors with the name of the file.

    Raises:
        FormatError: for any FormatError or OSError within.
    """
    try:
        yield
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None

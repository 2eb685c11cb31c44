"""Errors about files."""


class FormatError(ValueError):
    """A file that cannot be used; the message names the file, layer, value and remedy."""

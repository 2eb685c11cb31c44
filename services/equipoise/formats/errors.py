"""What can be wrong with a file."""


class FormatError(ValueError):
    """A file that cannot be used; the message names the file, the layer, the value, the remedy."""

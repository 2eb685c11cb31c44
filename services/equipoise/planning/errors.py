"""What can be wrong with input that reaches planning."""


class InvalidLayoutError(ValueError):
    """A table of experts that no pool may run; the message names layer, slot or expert."""


class InvalidReportError(ValueError):
    """A load report that cannot be used; `kind` is short and fixed, the message has the numbers."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class InvalidPolicyError(ValueError):
    """A policy value outside its range; the message names the field and the range."""

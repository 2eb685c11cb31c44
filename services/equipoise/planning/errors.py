"""Errors about input that reaches planning."""


class InvalidLayoutError(ValueError):
    """A placement that no pool may run; the message names the layer, slot or expert."""


class InvalidReportError(ValueError):
    """A load report that cannot be used: `kind` is a constant, the message has the details."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class InvalidPolicyError(ValueError):
    """A policy value outside its range; the message names the field and the range."""

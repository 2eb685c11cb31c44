"""What can be wrong with a message from outside."""


class InvalidMessageError(ValueError):
    """A message that cannot be used; it is dropped and counted, and the sender is told.

    `kind` is short and fixed, so that faults can be counted by it (for example
    "report_shape"); the message names the field, the value and the remedy.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

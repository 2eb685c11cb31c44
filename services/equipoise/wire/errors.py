"""The error of an invalid message."""


class InvalidMessageError(ValueError):
    """A received message is invalid. It is dropped and counted, and the sender gets the reason.

    `kind` is a short constant to count errors by, such as "report_shape". The text names the field,
    the value and the valid values.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

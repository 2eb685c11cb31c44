"""What can be wrong with credentials: our own, or a caller's."""

import grpc


class TrustError(RuntimeError):
    """Credentials of our own that cannot be used; one line that names the file and the remedy."""


class RefusedCallerError(Exception):
    """A caller who may not do this; `code` is UNAUTHENTICATED or PERMISSION_DENIED."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code

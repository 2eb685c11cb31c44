"""Errors of credentials: this process's own, or a caller's."""

import grpc


class TrustError(RuntimeError):
    """This process's credentials are unusable; one line names the file and the remedy."""


class InvalidTokenError(Exception):
    """A token that proves no identity; the message says why and follows "the token is rejected"."""


class RejectedCallerError(Exception):
    """The caller may not do this; `code` is UNAUTHENTICATED or PERMISSION_DENIED."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code

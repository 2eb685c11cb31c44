"""Errors of credentials: this process's own, or a caller's."""


class TrustError(RuntimeError):
    """This process's credentials are unusable; one line names the file and the remedy."""


class InvalidTokenError(Exception):
    """A token that proves no identity; the message says why and follows "the token is rejected"."""

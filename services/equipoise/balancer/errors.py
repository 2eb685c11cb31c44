"""Errors of the balancer."""


class UnknownPoolError(LookupError):
    """There is no such pool; the message names those that exist."""


class BalancerError(RuntimeError):
    """The balancer cannot start; the message is the one line that is printed."""


class UnansweredError(RuntimeError):
    """The outcome of an operator's request is unknown; the message says why."""

"""What is wrong with a worker or a question, in exceptions of our own."""


class RefusedWorkerError(Exception):
    """A worker that this pool cannot take; `kind` is short and fixed, for counting."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class UnknownPoolError(LookupError):
    """A pool that the balancer does not know; the message names those it knows."""


class BalancerError(RuntimeError):
    """The balancer cannot start; the message is the one line that a person reads."""


class UnansweredError(RuntimeError):
    """What became of an operator's request is not known; the message says why."""

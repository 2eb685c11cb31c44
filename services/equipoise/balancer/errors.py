"""What is wrong with a worker or a question, in exceptions of our own."""


class UnknownPoolError(LookupError):
    """A pool that the balancer does not know; the message names those it knows."""


class BalancerError(RuntimeError):
    """The balancer cannot start; the message is the one line that a person reads."""


class UnansweredError(RuntimeError):
    """What became of an operator's request is not known; the message says why."""

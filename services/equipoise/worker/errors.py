"""Exceptions of our own engine and worker process."""

from equipoise.rank.errors import GroupError, WorkerError
from equipoise.wire.inference_messages import Blame


class RejectedError(WorkerError):
    """The balancer does not accept this worker; the message names the remedy."""


class StepError(WorkerError):
    """A step failed on this rank, not in the group."""

    def __init__(
        self, message: str, *, keys: tuple[int, ...] = (), blame: Blame = Blame.STEP
    ) -> None:
        super().__init__(message)
        self.keys = keys
        """The requests that the step ran on this rank."""
        self.blame = blame
        """Whether these requests may have caused the failure."""


class StepTimeoutError(GroupError):
    """A collective timed out: a peer hangs or is very slow."""


class QueueFullError(Exception):
    """The queue is full; the request may be retried later."""


class NotServingError(Exception):
    """This worker has no engine yet; says why."""

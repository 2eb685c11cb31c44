"""What users, peers and the network can do to a worker, in exceptions of our own."""

from equipoise.wire.inference import Blame


class WorkerError(Exception):
    """The worker cannot go on; the message is the one line that a person reads."""


class RejectedError(WorkerError):
    """The balancer does not accept this worker; its reason says what to change."""


class StepError(WorkerError):
    """A step failed on this rank, not in the group.

    `keys` are the requests that it ran here, `blame` is how far each may be the cause.
    """

    def __init__(
        self, message: str, *, keys: tuple[int, ...] = (), blame: Blame = Blame.STEP
    ) -> None:
        super().__init__(message)
        self.keys = keys
        self.blame = blame


class GroupError(WorkerError):
    """The group of ranks cannot take another step: a peer failed, left or disagrees."""


class StepTimeoutError(GroupError):
    """A collective of a step reached its bound: a peer hangs, or is very slow."""


class PeerLeftError(GroupError):
    """A peer left by its own will; nothing is broken, but this group is over."""


class InvalidRequestError(ValueError):
    """A request that no worker could serve; the message names the limit."""


class QueueFullError(Exception):
    """Every place in the queue is taken; the request may be sent again later."""


class TransferError(Exception):
    """An expert's bytes could not be had from a source; the message names source and fault."""


class StageRefusedError(Exception):
    """A generation that this worker will not run; the message says what would help."""


class NotHeldError(Exception):
    """An expert that this rank cannot give; another source can."""


class LinkLostError(Exception):
    """The stream to the balancer ended; the message says how, and a new one is tried."""


class NotLeadingError(LinkLostError):
    """A balancer answered that it does not lead; `leader_address` may name the one that does."""

    def __init__(self, reason: str, *, leader_address: str | None) -> None:
        super().__init__(reason)
        self.leader_address = leader_address

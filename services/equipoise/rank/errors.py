"""Exceptions for the faults of peers, the network and this rank."""

from equipoise.planning.arrays import Checksums


class WorkerError(Exception):
    """The worker cannot continue; the message is the line that the operator sees."""


class DamagedSlotError(WorkerError):
    """A slot no longer holds the bytes that it was filled with: this process cannot be trusted."""

    def __init__(self, message: str, *, checksums: Checksums) -> None:
        super().__init__(message)
        self.checksums = checksums
        """Of all own slots as they are now, uint8 [layers, slots_per_rank, 16]."""


class GroupError(WorkerError):
    """The group of ranks cannot take another step: a peer failed, left or disagrees."""

    def __init__(self, message: str, *, unreached: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.unreached = unreached
        """Workers that this rank could not connect to, if the ranks did not form."""


class PeerLeftError(GroupError):
    """A peer shut down gracefully, which ends the group."""


class TransferError(Exception):
    """An expert is unavailable from a source; the message names the source and the fault."""


class StageRejectedError(Exception):
    """A Stage that this worker rejects; the message names the remedy."""


class NotHeldError(Exception):
    """This rank does not hold an expert; another source may."""


class LinkLostError(Exception):
    """The stream to the balancer ended; the agent opens another."""


class NotLeadingError(LinkLostError):
    """The balancer does not lead; `leader_address` is the leader's, if known."""

    def __init__(self, reason: str, *, leader_address: str | None) -> None:
        super().__init__(reason)
        self.leader_address = leader_address

"""Errors of the kernels; every message names the cause and the remedy."""


class KernelInputError(ValueError):
    """A tensor's dtype, shape, stride, device or alignment violates an operation's contract."""


class KernelsUnavailableError(RuntimeError):
    """A backend named in the settings cannot run here."""


class AllToAllError(RuntimeError):
    """Ranks could not exchange rows; the message and `ranks` name the ranks involved.

    The buffer that raised it can no longer be used: the ranks must form a new group.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class PeerMissingError(AllToAllError):
    """Ranks did not send within the buffer's timeout."""


class GenerationMismatchError(AllToAllError):
    """Ranks run another generation of the layout."""


class CapacityError(AllToAllError):
    """A rank had more rows for another rank than a buffer holds; nothing was overwritten."""


class UnknownSlotError(AllToAllError):
    """A rank named slots that the pool does not have."""

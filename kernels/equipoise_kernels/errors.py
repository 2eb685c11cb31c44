"""What the kernel suite raises: every message names the thing and the remedy."""


class KernelInputError(ValueError):
    """A tensor's dtype, shape, stride, device or alignment breaks an operation's contract."""


class KernelsUnavailableError(RuntimeError):
    """What was asked for by name cannot run here."""


class AllToAllError(RuntimeError):
    """Ranks could not exchange rows: the message and `ranks` say with whom.

    A buffer that raised one is of no more use: the ranks must form anew.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class PeerMissingError(AllToAllError):
    """Ranks did not send within the buffer's timeout."""


class GenerationMismatchError(AllToAllError):
    """Ranks run another generation of the layout."""


class CapacityError(AllToAllError):
    """Ranks had more rows for one rank than a buffer holds; nothing was overwritten."""


class UnknownSlotError(AllToAllError):
    """Ranks named slots that the pool does not have."""

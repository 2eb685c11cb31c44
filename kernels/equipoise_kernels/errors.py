"""What the kernel suite raises: every message names the thing and the remedy."""


class KernelInputError(ValueError):
    """A tensor's dtype, shape, stride, device or alignment breaks an operation's contract."""


class KernelsUnavailableError(RuntimeError):
    """What was asked for by name cannot run here."""

"""`Readiness`: what a balancer still needs before it can accept workers."""

from equipoise.balancer.changed import Changed


class Readiness:
    """Reasons not to be ready, by concern; ready if there is none."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._changed = Changed()

    @property
    def missing(self) -> str:
        """All reasons; empty when ready."""
        return "; ".join(self._reasons.values())

    def note(self, concern: str, reason: str) -> None:
        """Set what `concern` still needs; an empty reason means ready."""
        if reason:
            self._reasons[concern] = reason
        else:
            self._reasons.pop(concern, None)
        self._changed.notify()

    async def until_ready(self) -> None:
        """Wait until there is no reason left."""
        while self._reasons:
            await self._changed.wait()

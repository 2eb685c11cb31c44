"""What Equipoise's own worker has, and a rank inside an engine does not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from equipoise.rank.errors import TransferError
from equipoise.wire.balancer_messages import Stage
from equipoise.wire.messages import LayoutRejected, Staged


class NoSpans:
    """In place of traces, which would need OpenTelemetry in the engine."""

    @contextmanager
    def staging(self, stage: Stage) -> Iterator[Callable[[Staged | LayoutRejected], None]]:
        """Record nothing."""
        del stage
        yield lambda _answer: None


async def no_checkpoint(layer: int, expert: int) -> Tensor:
    """Read no expert.

    Raises:
        TransferError: an engine's weights are not in the format of its checkpoint.
    """
    del layer, expert
    raise TransferError("an engine's weights are not in the format of its checkpoint")

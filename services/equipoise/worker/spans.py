"""`RankSpans`: a rank's stages and switches as spans of the rollout's trace."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer

from equipoise.telemetry.tracing import failed, parent_of
from equipoise.wire.balancer_messages import Stage
from equipoise.wire.messages import LayoutRejected, Staged, Switched


class RankSpans:
    """Records spans, or nothing without a tracer; used from the event loop only."""

    def __init__(self, tracer: Tracer | None, *, pool: str, worker: str) -> None:
        self._tracer = tracer or NoOpTracer()
        self._labels = {"pool": pool, "worker": worker}
        self._generation = 0
        self._parent = Context()

    @contextmanager
    def staging(self, stage: Stage) -> Iterator[Callable[[Staged | LayoutRejected], None]]:
        """Record the staging of a generation; call the result with the answer.

        The generation's switch becomes a sibling span.
        """
        self._generation = stage.layout.generation
        self._parent = parent_of(stage.traceparent)
        span = self._tracer.start_span(
            "rank stage",
            context=self._parent,
            attributes={
                **self._labels,
                "generation": stage.layout.generation,
                "moves": len(stage.moves),
            },
        )
        try:
            yield partial(_record_answer, span)
        except asyncio.CancelledError:
            failed(span, "dropped: aborted, or replaced by another generation")
            raise
        finally:
            span.end()

    def switched(self, switched: Switched) -> None:
        """Record a switch that has just ended."""
        parent = self._parent if switched.generation == self._generation else Context()
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            "rank switch",
            context=parent,
            start_time=ended_ns - 1000 * switched.stall_us,
            attributes={
                **self._labels,
                "rank": switched.rank,
                "generation": switched.generation,
                "step": switched.step,
                "stall_us": switched.stall_us,
            },
        )
        span.end(end_time=ended_ns)


def _record_answer(span: Span, answer: Staged | LayoutRejected) -> None:
    if isinstance(answer, LayoutRejected):
        failed(span, answer.reason)
        return
    span.set_attributes(
        {
            "rank": answer.rank,
            "peer_bytes": answer.peer_bytes,
            "checkpoint_bytes": answer.checkpoint_bytes,
        }
    )

"""`RankSpans`: what a rank does about a rollout, told as spans of the rollout's trace."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer

from equipoise.telemetry.tracing import failed, parent_of
from equipoise.wire.messages import Stage, Staged, Switched


class RankSpans:
    """Used from the event loop only; makes nothing without a `tracer`."""

    def __init__(self, tracer: Tracer | None = None, *, pool: str = "", worker: str = "") -> None:
        self._tracer = tracer or NoOpTracer()
        self._who = {"pool": pool, "worker": worker}
        self._generation = 0
        self._parent = Context()

    @contextmanager
    def staging(self, stage: Stage) -> Iterator["Staging"]:
        """The span of preparing a generation, whose switch will belong beside it."""
        self._generation = stage.layout.generation
        self._parent = parent_of(stage.traceparent)
        span = self._tracer.start_span(
            "rank stage",
            context=self._parent,
            attributes={
                **self._who,
                "generation": stage.layout.generation,
                "moves": len(stage.moves),
            },
        )
        try:
            yield Staging(span)
        except asyncio.CancelledError:
            failed(span, "dropped: it was aborted, or another generation is wanted")
            raise
        finally:
            span.end()

    def switched(self, switched: Switched) -> None:
        """The span of a switch that has just ended, as long as the engine says it took."""
        parent = self._parent if switched.generation == self._generation else Context()
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            "rank switch",
            context=parent,
            start_time=ended_ns - 1000 * switched.stall_us,
            attributes={
                **self._who,
                "rank": switched.rank,
                "generation": switched.generation,
                "step": switched.step,
                "stall_us": switched.stall_us,
            },
        )
        span.end(end_time=ended_ns)


class Staging:
    """A generation that is being prepared."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def done(self, staged: Staged) -> None:
        """All bytes are here and verified."""
        self._span.set_attributes(
            {
                "rank": staged.rank,
                "peer_bytes": staged.peer_bytes,
                "checkpoint_bytes": staged.checkpoint_bytes,
            }
        )

    def refused(self, reason: str) -> None:
        """It cannot be had."""
        failed(self._span, reason)

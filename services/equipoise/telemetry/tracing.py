"""Spans for an OTLP collector; none are made unless somebody names one.

The rest programs against OpenTelemetry's small API. Its SDK, an extra, is known here only.
"""

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.spans_settings import ENDPOINT_VARIABLE, check_endpoint

_EXPORT_TIMEOUT_S = 2.0
_LAST_WORDS_S = 3.0
"""How long a process that ends waits for a collector."""

_HEADER = "traceparent"

_log = logging.getLogger(__name__)


@contextmanager
def tracing(endpoint: str, *, service: str) -> Iterator[Tracer]:
    """A tracer whose spans go to the collector at `endpoint`; one that makes none if there is none.

    Where `endpoint` is empty, OpenTelemetry's variable of the environment says it. That one is
    often meant for other programs of a machine, so what is wrong with it costs spans, as does a
    collector that is away, and nothing else. `service` says whose spans they are;
    OTEL_SERVICE_NAME goes before it.

    Raises:
        TelemetryError: `endpoint` is none, or the SDK is not installed.
    """
    provider = None
    try:
        provider = _provider(endpoint or os.environ.get(ENDPOINT_VARIABLE, ""), service=service)
    except TelemetryError as error:
        if endpoint:
            raise
        _log.warning("no traces are made, because of %s: %s", ENDPOINT_VARIABLE, error)
    if provider is None:
        yield NoOpTracer()
        return
    try:
        yield provider.get_tracer("equipoise")
    finally:
        # On a thread, because a collector that hangs would hold it up for half a minute.
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_LAST_WORDS_S)


def traceparent_of(span: Span) -> str:
    """What another process needs to make children of `span`, as W3C has it; empty for no span."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(_HEADER, "")


def parent_of(traceparent: str) -> Context:
    """The context in which spans are children of another process's; a new trace if it has none."""
    return TraceContextTextMapPropagator().extract({_HEADER: traceparent}, Context())


def failed(span: Span, reason: str) -> None:
    """Mark what a span stands for as failed."""
    span.set_status(Status(StatusCode.ERROR, reason))


def _provider(endpoint: str, *, service: str) -> Any:
    """The SDK's provider of tracers; None if there is no endpoint."""
    if not endpoint:
        return None
    check_endpoint(endpoint)
    try:
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
    except ModuleNotFoundError as error:
        raise TelemetryError(
            f"tracing needs {error.name}: pip install 'equipoise[tracing]', or leave out "
            f"--tracing-endpoint and {ENDPOINT_VARIABLE}"
        ) from error
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}
    provider = sdk.TracerProvider(resource=resources.Resource.create(named), shutdown_on_exit=False)
    spans = exporter.OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(export.BatchSpanProcessor(spans, schedule_delay_millis=1000))
    return provider

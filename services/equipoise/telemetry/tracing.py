"""Traces for an OTLP collector; none are recorded unless an endpoint is set.

Other modules use OpenTelemetry's small API. Only this one imports its SDK, an optional extra.
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

from equipoise.settings.errors import InvalidSettingsError
from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.spans_settings import ENDPOINT_VARIABLE, check_endpoint

_EXPORT_TIMEOUT_S = 2.0
_SHUTDOWN_TIMEOUT_S = 3.0
"""Seconds that a stopping process waits for the collector."""

_HEADER = "traceparent"

_log = logging.getLogger(__name__)


@contextmanager
def tracing(endpoint: str, *, service: str) -> Iterator[Tracer]:
    """Yield a tracer that exports spans to the collector at `endpoint`, or a no-op tracer.

    If `endpoint` is empty, OTEL_EXPORTER_OTLP_ENDPOINT is used. Because that variable is often set
    for other programs on the machine, an error in it only disables tracing with a warning. A
    collector that does not answer never fails the process. `service` is the service name unless
    OTEL_SERVICE_NAME is set.

    Raises:
        InvalidSettingsError: `endpoint` is not an OTLP endpoint.
        TelemetryError: the SDK is not installed.
    """
    provider = None
    try:
        provider = _provider(endpoint or os.environ.get(ENDPOINT_VARIABLE, ""), service=service)
    except (InvalidSettingsError, TelemetryError) as error:
        if endpoint:
            raise
        _log.warning("tracing is disabled, because %s is unusable: %s", ENDPOINT_VARIABLE, error)
    if provider is None:
        yield NoOpTracer()
        return
    try:
        yield provider.get_tracer("equipoise")
    finally:
        # On a thread, because a hung collector would block the process for half a minute.
        shutdown = threading.Thread(target=provider.shutdown, name="trace shutdown", daemon=True)
        shutdown.start()
        shutdown.join(_SHUTDOWN_TIMEOUT_S)


def traceparent_of(span: Span) -> str:
    """The W3C traceparent of `span`, for child spans in other processes; empty for no span."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(_HEADER, "")


def parent_of(traceparent: str) -> Context:
    """The context for child spans of a remote span; a new trace if `traceparent` is empty."""
    return TraceContextTextMapPropagator().extract({_HEADER: traceparent}, Context())


def failed(span: Span, reason: str) -> None:
    """Mark a span as failed."""
    span.set_status(Status(StatusCode.ERROR, reason))


def _provider(endpoint: str, *, service: str) -> Any:
    """The SDK's tracer provider; None if there is no endpoint."""
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
            f"tracing needs equipoise[tracing] (there is no {error.name}): run pip install "
            f"'.[tracing]' in a checkout, or unset --tracing-endpoint and {ENDPOINT_VARIABLE}"
        ) from error
    attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}
    provider = sdk.TracerProvider(
        resource=resources.Resource.create(attributes), shutdown_on_exit=False
    )
    spans = exporter.OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(export.BatchSpanProcessor(spans, schedule_delay_millis=1000))
    return provider

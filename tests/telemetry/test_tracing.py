"""Spans are exported to a collector, lost if it is down, and not recorded without one."""

import logging
import sys

import pytest

from equipoise.settings.errors import InvalidSettingsError
from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.spans_settings import ENDPOINT_VARIABLE, check_endpoint
from equipoise.telemetry.tracing import failed, parent_of, traceparent_of, tracing
from tests.support.collector import Collector


def test_a_collector_receives_a_span_and_its_child_from_another_process(monkeypatch):
    with Collector() as collector:
        with tracing(collector.endpoint, service="balancer") as tracer:
            parent = tracer.start_span("wave")
            traceparent = traceparent_of(parent)
            failed(parent, "it was aborted")
            parent.end()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "worker of ours")
        with tracing(collector.endpoint, service="worker") as tracer:
            tracer.start_span("rank stage", context=parent_of(traceparent)).end()
        wave, stage = collector.until(lambda spans: len(spans) == 2)
    assert (wave.name, wave.service, wave.fault) == ("wave", "balancer", "it was aborted")
    assert (stage.name, stage.service, stage.fault) == ("rank stage", "worker of ours", "")
    assert (stage.trace, stage.parent) == (wave.trace, wave.id)
    assert not wave.parent


def test_without_a_collector_no_spans_are_recorded_or_propagated():
    with tracing("", service="balancer") as tracer:
        span = tracer.start_span("wave")
        assert not span.is_recording()
        assert traceparent_of(span) == ""
    assert not parent_of("")


def test_an_unreachable_collector_loses_spans_and_nothing_else(caplog):
    with Collector() as collector:
        endpoint = collector.endpoint
    with caplog.at_level(logging.CRITICAL), tracing(endpoint, service="balancer") as tracer:
        tracer.start_span("wave").end()


def test_the_environment_variable_is_used_without_an_option(monkeypatch):
    with Collector() as collector:
        monkeypatch.setenv(ENDPOINT_VARIABLE, collector.endpoint)
        with tracing("", service="balancer") as tracer:
            tracer.start_span("wave").end()
        collector.until(lambda spans: len(spans) == 1)


def warnings_without_spans(caplog):
    with tracing("", service="balancer") as tracer:
        assert not tracer.start_span("wave").is_recording()
    return [record.getMessage() for record in caplog.records]


def test_an_invalid_environment_variable_only_disables_tracing(monkeypatch, caplog):
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://otel:4318/v1/traces")
    (warning,) = warnings_without_spans(caplog)
    assert "tracing is disabled, because OTEL_EXPORTER_OTLP_ENDPOINT" in warning


def test_without_the_sdk_only_an_option_is_an_error(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with (
        pytest.raises(TelemetryError, match=r"pip install '\.\[tracing\]'"),
        tracing("http://otel:4317", service="balancer"),
    ):
        pass
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://otel:4317")
    (warning,) = warnings_without_spans(caplog)
    assert "pip install '.[tracing]'" in warning


@pytest.mark.parametrize("endpoint", ["otel:4317", "http://otel", "http://otel:4318/v1/traces"])
def test_an_invalid_endpoint_is_an_error(endpoint):
    with pytest.raises(InvalidSettingsError, match="must be http://host:port"):
        check_endpoint(endpoint)


def test_valid_endpoints_are_accepted():
    for endpoint in ("", "http://otel:4317", "https://otel.svc:4317/", "https://api.honey.io"):
        check_endpoint(endpoint)

"""Spans on their way to a real collector, to one that is away, and to none."""

import logging

import pytest
from collector import Collector

from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.spans_settings import check_endpoint
from equipoise.telemetry.tracing import failed, parent_of, traceparent_of, tracing


def test_a_collector_hears_of_a_span_and_of_its_child_in_another_process(monkeypatch):
    with Collector() as collector:
        with tracing(collector.endpoint, service="balancer") as tracer:
            parent = tracer.start_span("wave")
            told = traceparent_of(parent)
            failed(parent, "it was aborted")
            parent.end()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "worker of ours")
        with tracing(collector.endpoint, service="worker") as tracer:
            tracer.start_span("rank stage", context=parent_of(told)).end()
        wave, stage = collector.until(lambda spans: len(spans) == 2)
    assert (wave.name, wave.service, wave.fault) == ("wave", "balancer", "it was aborted")
    assert (stage.name, stage.service, stage.fault) == ("rank stage", "worker of ours", "")
    assert (stage.trace, stage.parent) == (wave.trace, wave.id)
    assert not wave.parent


def test_without_a_collector_there_are_no_spans_and_nobody_is_told_of_one():
    with tracing("", service="balancer") as tracer:
        span = tracer.start_span("wave")
        assert not span.is_recording()
        assert traceparent_of(span) == ""
    assert not parent_of("")


def test_a_collector_that_is_away_costs_spans_and_nothing_else(caplog):
    with Collector() as collector:
        endpoint = collector.endpoint
    with caplog.at_level(logging.CRITICAL), tracing(endpoint, service="balancer") as tracer:
        tracer.start_span("wave").end()


@pytest.mark.parametrize("endpoint", ["otel:4317", "http://otel", "http://otel:4318/v1/traces"])
def test_an_endpoint_that_is_none_is_refused_in_words(endpoint):
    with pytest.raises(TelemetryError, match="must be http://host:port"):
        check_endpoint(endpoint)


def test_good_endpoints_are_taken():
    for endpoint in ("", "http://otel:4317", "https://otel.observability.svc:4317/"):
        check_endpoint(endpoint)

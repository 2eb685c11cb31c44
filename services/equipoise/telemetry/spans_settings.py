"""What a person may choose about spans; a part of other settings. Imports nothing heavy."""

import re

from equipoise.telemetry.errors import TelemetryError

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable, for where no option says who gets spans."""


def check_endpoint(endpoint: str) -> None:
    """See that spans, if anybody gets them, go to a port of OTLP over gRPC.

    Raises:
        TelemetryError: it is none.
    """
    if endpoint and not re.fullmatch(r"https?://[^\s/]+:\d{1,5}/?", endpoint):
        raise TelemetryError(
            "tracing_endpoint must be http://host:port of an OTLP collector's gRPC port, mostly "
            f"4317, not {endpoint!r}"
        )

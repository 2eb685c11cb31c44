"""What a person may choose about spans; a part of other settings. Imports nothing heavy."""

import re

from equipoise.telemetry.errors import TelemetryError

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable, for where no option says who gets spans."""

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+)"
_ENDPOINT = rf"http://{_HOST}:\d{{1,5}}/?|https://{_HOST}(?::\d{{1,5}})?/?"


def check_endpoint(endpoint: str) -> None:
    """See that spans, if anybody gets them, go to a port of OTLP over gRPC.

    Raises:
        TelemetryError: it is none.
    """
    if endpoint and not re.fullmatch(_ENDPOINT, endpoint):
        raise TelemetryError(
            "tracing_endpoint must be http://host:port of an OTLP collector's gRPC port, mostly "
            f"4317, or https://host for port 443, not {endpoint!r}"
        )

"""The tracing endpoint, a setting of several processes. Imports nothing heavy."""

import re

from equipoise.settings.errors import InvalidSettingsError

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable, used when no option names an endpoint."""

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+)"
_ENDPOINT = rf"http://{_HOST}:\d{{1,5}}/?|https://{_HOST}(?::\d{{1,5}})?/?"


def check_endpoint(endpoint: str) -> None:
    """Check that an endpoint is empty or an OTLP/gRPC endpoint.

    Raises:
        InvalidSettingsError: it is neither.
    """
    if endpoint and not re.fullmatch(_ENDPOINT, endpoint):
        raise InvalidSettingsError(
            "tracing_endpoint must be http://host:port of an OTLP collector's gRPC port, usually "
            f"4317, or https://host for port 443, not {endpoint!r}"
        )

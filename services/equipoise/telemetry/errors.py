"""Errors of telemetry."""


class TelemetryError(RuntimeError):
    """Telemetry cannot start; the message names the setting and the remedy."""

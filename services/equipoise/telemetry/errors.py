"""What a user can do wrong about telemetry."""


class TelemetryError(RuntimeError):
    """Metrics cannot be served; the message names the address and what to do."""

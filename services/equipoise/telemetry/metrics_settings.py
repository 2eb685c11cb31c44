"""`MetricsPort`: the options of the metrics port, which every process shares. Reads no file."""

from dataclasses import dataclass

from equipoise.settings.address import listen_address
from equipoise.settings.errors import InvalidSettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPort:
    """Where and to whom a process serves its metrics.

    Raises:
        InvalidSettingsError: the address is not host:port, or an option has no port to apply to.
    """

    metrics_listen: str = ""
    """host:port of an HTTP server for Prometheus metrics at /metrics. Disabled by default. Port 0
    picks a free port, shown in the log."""

    metrics_token_file: str = ""
    """File with the bearer token that scrapers of the metrics must present; read again for every
    request. Without it, anyone who can reach the port can read them."""

    metrics_tls: bool = False
    """Serve the metrics over TLS, with the certificate of --tls-cert. Scrapers need no
    certificate."""

    def __post_init__(self) -> None:
        if self.metrics_listen:
            listen_address("metrics_listen", self.metrics_listen)
        elif self.metrics_token_file or self.metrics_tls:
            raise InvalidSettingsError(
                "metrics_token_file and metrics_tls protect the metrics port: set metrics_listen"
            )

    def check(self, *, has_certificate: bool) -> None:
        """Check that the process has what the port needs.

        Raises:
            InvalidSettingsError: TLS is wanted without a certificate.
        """
        if self.metrics_tls and not has_certificate:
            raise InvalidSettingsError("metrics_tls needs a certificate: set tls_cert and tls_key")

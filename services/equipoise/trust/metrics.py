"""`CertificateCollector`: when this process's certificates expire."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from equipoise.trust.credentials import Credentials


class CertificateCollector(Collector):
    """Collects from `credentials`; nothing if they have no certificates."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def collect(self) -> Iterator[Metric]:
        """Yield the expiry of each file in use."""
        expiry = GaugeMetricFamily(
            "equipoise_certificate_expiry_timestamp_seconds",
            "Unix time at which the earliest certificate of a file in use expires.",
            labels=("certificate",),
        )
        for setting, expires_s in self._credentials.expires_s().items():
            expiry.add_metric([setting], expires_s)
        yield expiry

"""`HttpsCertificate`: TLS for the HTTP ports of this process, whose clients need no certificate."""

import logging
import ssl

from equipoise.telemetry.http import Tls
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError

_log = logging.getLogger(__name__)


class HttpsCertificate:
    """The certificate of `credentials`, for servers other than gRPC's.

    Raises:
        TrustError: OpenSSL rejects the certificate, or the process has none.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._version = credentials.version()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context of a new connection, with the current certificate.

        If a replaced certificate is unusable, the last valid one stays in use.
        """
        if (version := self._credentials.version()) != self._version:
            self._version = version
            try:
                self._context = self._load()
            except TrustError as error:
                _log.warning("keeping the last valid certificate: %s", error)
        return self._context

    def _load(self) -> ssl.SSLContext:
        tls = self._credentials.tls
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(tls.tls_cert, tls.tls_key)
        except OSError as error:  # ssl.SSLError too
            raise TrustError(f"tls_cert {tls.tls_cert} cannot serve HTTPS: {error}") from error
        return context


def metrics_https(credentials: Credentials, port: MetricsPort) -> Tls | None:
    """The TLS of the metrics port; None if it uses plain HTTP.

    Raises:
        TrustError: the certificate cannot be used.
    """
    return HttpsCertificate(credentials).context if port.metrics_tls else None

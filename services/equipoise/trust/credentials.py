"""`Credentials`: this process's certificates and signing key, for its channels and ports."""

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import grpc

from equipoise.telemetry.logs import printable
from equipoise.trust.certificates import CertificateFiles, explain_handshake
from equipoise.trust.errors import TrustError
from equipoise.trust.settings import BALANCER_NAME, WORKER_NAME, Tls
from equipoise.trust.tokens import SigningKey

Options = Sequence[tuple[str, str | int]]
Metadata = tuple[tuple[str, str], ...]

KEEPALIVE_OPTIONS: Options = (
    # Detects within 15 s that the machine at the other end of an idle connection is gone.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without this, gRPC waits a minute for the answer to a ping.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of servers and of channels between this system's processes."""

ACCEPTED_PINGS: Options = (("grpc.http2.min_ping_interval_without_data_ms", 1_000),)
"""Option of servers: callers may ping once per second; more is rejected as abuse."""

RANK_PORT_OPTIONS: Options = (
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    # A second process on the same port must fail, not take half of the calls.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    *ACCEPTED_PINGS,
)
"""Options of the servers of ranks."""

MAX_RANK_CALLS = 4096
"""Concurrent calls of such a server; requests beyond a worker's queue are rejected long before."""

_MAX_DETAILS = 800
"""Characters of a peer's details that are kept."""

_log = logging.getLogger(__name__)


class Credentials:
    """Certificates and a signing key, reloaded when their files are replaced.

    If a replaced file is unusable, a warning is logged and the last valid contents stay in use.

    Raises:
        TrustError: a file is unusable at the start.
    """

    def __init__(
        self,
        tls: Tls | None = None,
        *,
        signing_key: str = "",
        worker_name: str = WORKER_NAME,
        balancer_name: str = BALANCER_NAME,
    ) -> None:
        """`worker_name` and `balancer_name` are the DNS names of these roles in certificates.

        They are verified instead of the address, so that a worker's certificate cannot serve as a
        balancer, nor a client's as either, and pods can be dialled by their addresses.
        """
        self.tls = tls or Tls()
        if self.tls.tls_ca and ("" in {worker_name, balancer_name} or worker_name == balancer_name):
            raise TrustError(
                f"tls_worker_name {worker_name!r} and tls_balancer_name {balancer_name!r} must be "
                "set and differ: they distinguish the roles of servers"
            )
        self._worker_options = _named(worker_name)
        self._balancer_options = _named(balancer_name)
        self._key = SigningKey(signing_key) if signing_key else None
        self._files = CertificateFiles(self.tls)
        self._certificates = self._files.read(now=datetime.now(UTC))
        self._version = 1
        self._fault = ""

    def version(self) -> int:
        """A number that grows when certificates are replaced; reopen channels of older versions."""
        self._refresh()
        return self._version

    def expires_s(self) -> Mapping[str, float]:
        """When the certificates in use expire, in Unix seconds: `tls_ca` and `tls_cert`, if any."""
        self._refresh()
        return self._certificates.expires_s

    def _channel(self, address: str, options: Options) -> grpc.aio.Channel:
        self.tls.check_dial(address)
        if not self.tls.tls_ca:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._for_channels(), options=options)

    def worker_channel(self, address: str, *, options: Options = ()) -> grpc.aio.Channel:
        """Open a channel to a worker at host:port, whose certificate must have `worker_name`.

        It is kept alive: a pull or a request does not go to a machine that is known to be gone.

        Raises:
            TrustError: plain text would leave this machine without `insecure`.
        """
        return self._channel(address, (*options, *KEEPALIVE_OPTIONS, *self._worker_options))

    def balancer_channel(self, address: str, *, options: Options = ()) -> grpc.aio.Channel:
        """Open a channel to a balancer at host:port, whose certificate must have `balancer_name`.

        Raises:
            TrustError: plain text would leave this machine without `insecure`.
        """
        return self._channel(address, (*options, *self._balancer_options))

    def blocking_channel(self, address: str, *, options: Options = ()) -> grpc.Channel:
        """Open a blocking channel to a balancer, as `balancer_channel`.

        It is kept alive: a call whose balancer's machine is gone fails within 15 s.
        """
        self.tls.check_dial(address)
        options = (*options, *KEEPALIVE_OPTIONS, *self._balancer_options)
        if not self.tls.tls_ca:
            return grpc.insecure_channel(address, options=tuple(options))
        return grpc.secure_channel(address, self._for_channels(), options=tuple(options))

    def metadata(self, *, audience: str) -> Metadata:
        """Metadata of one call to `audience`: a token for it, if there is a signing key."""
        if self._key is None:
            return ()
        token = self._key.token(audience=audience, now=time.time())
        return (("authorization", f"Bearer {token}"),)

    def bind(self, server: grpc.aio.Server, listen: str) -> int:
        """Open a port of `server` at host:port; returns the port number.

        Raises:
            TrustError: the port would accept plain text from other machines without `insecure`.
            RuntimeError: the port cannot be opened.
        """
        self.tls.check_listen(listen)
        if not self.tls.serves_tls:
            return server.add_insecure_port(listen)
        return server.add_secure_port(
            listen,
            grpc.dynamic_ssl_server_credentials(
                self._for_ports(),
                self._newest_for_ports,
                require_client_authentication=self.tls.is_mutual,
            ),
        )

    def explain(self, details: str | None) -> str:
        """The details of a failed call, preceded by the certificate problem behind them, if any.

        Peers choose the details: they become one line of bounded length for logs and clients.
        """
        line = printable(details[:_MAX_DETAILS] if details else "no details")[:_MAX_DETAILS]
        problem = self.problem(details)
        return f"{problem} ({line})" if problem else line

    def problem(self, details: str | None) -> str:
        """The certificate problem behind the details of a failed call; empty if there is none."""
        return explain_handshake(details or "", self.tls)

    def _refresh(self) -> None:
        """Reload replaced files."""
        if not self._files.changed():
            return
        try:
            self._certificates = self._files.read(now=datetime.now(UTC))
        except TrustError as error:
            if str(error) != self._fault:  # They are read again at each handshake.
                self._fault = str(error)
                _log.warning("keeping the last valid certificates: %s", error)
            return
        self._version, self._fault = self._version + 1, ""
        _log.info("reloaded the certificates")

    def _for_channels(self) -> grpc.ChannelCredentials:
        self._refresh()
        found = self._certificates
        return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)

    def _for_ports(self) -> grpc.ServerCertificateConfiguration:
        found = self._certificates
        assert found.key is not None, "a TLS port has a key"
        assert found.cert is not None, "a TLS port has a certificate"
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)

    def _newest_for_ports(self) -> grpc.ServerCertificateConfiguration:
        """Called by gRPC at every handshake, on its own thread."""
        self._refresh()
        return self._for_ports()


def _named(name: str) -> Options:
    """Channel options that expect `name` in the server's certificate, whatever the address."""
    return (("grpc.ssl_target_name_override", name),)

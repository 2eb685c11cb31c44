"""`Credentials`: what this process shows to others, as channels it dials and ports it opens."""

import logging
from collections.abc import Sequence

import grpc

from equipoise.trust.certificates import CertificateFiles, handshake_words, utc_now
from equipoise.trust.errors import TrustError
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import OwnToken

Options = Sequence[tuple[str, str | int]]
Metadata = tuple[tuple[str, str], ...]

_log = logging.getLogger(__name__)


class Credentials:
    """Certificates and a token, read again when their files are replaced.

    Files that cannot be used any more leave what was read last, and are told once.

    Raises:
        TrustError: a file cannot be used to begin with.
    """

    def __init__(
        self,
        tls: Tls | None = None,
        *,
        token_file: str = "",
        worker_name: str = "",
        balancer_name: str = "",
    ) -> None:
        """`worker_name`, `balancer_name` are in the certificates of workers and of balancers.

        To be given if these are dialled by other names, such as the addresses of their pods.
        """
        self.tls = tls or Tls()
        self._worker_options = _named(worker_name)
        self._balancer_options = _named(balancer_name)
        self._token = OwnToken(token_file) if token_file else None
        self._files = CertificateFiles(self.tls)
        self._certificates = self._files.read(now=utc_now())
        self._version = 1

    def version(self) -> int:
        """Grows when certificates were replaced: older channels should be dialled anew."""
        self._refresh()
        return self._version

    def channel(self, address: str, *, options: Options = ()) -> grpc.aio.Channel:
        """A channel to host:port, with what the files say now.

        Raises:
            TrustError: plain text would leave this machine, which nobody asked for.
        """
        self.tls.check_dial(address)
        if not self.tls.tls_ca:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._for_channels(), options=options)

    def worker_channel(self, address: str, *, options: Options = ()) -> grpc.aio.Channel:
        """As `channel`, to a worker: its certificate may be for the workers' common name."""
        return self.channel(address, options=(*options, *self._worker_options))

    def balancer_channel(self, address: str, *, options: Options = ()) -> grpc.aio.Channel:
        """As `channel`, to a balancer: its certificate may be for the balancers' common name."""
        return self.channel(address, options=(*options, *self._balancer_options))

    def blocking_channel(self, address: str, *, options: Options = ()) -> grpc.Channel:
        """As `balancer_channel`, for programs without an event loop."""
        self.tls.check_dial(address)
        options = (*options, *self._balancer_options)
        if not self.tls.tls_ca:
            return grpc.insecure_channel(address, options=tuple(options))
        return grpc.secure_channel(address, self._for_channels(), options=tuple(options))

    def metadata(self) -> Metadata:
        """What every call must carry."""
        if self._token is None:
            return ()
        return (("authorization", f"Bearer {self._token.value()}"),)

    def bind(self, server: grpc.aio.Server, listen: str) -> int:
        """Open a port of `server` at host:port; returns its number.

        Raises:
            TrustError: it would speak plain text with other machines, which nobody asked for.
            RuntimeError: the port cannot be opened.
        """
        self.tls.check_listen(listen)
        if not self.tls.serves_tls:
            return server.add_insecure_port(listen)
        return server.add_secure_port(
            listen,
            grpc.dynamic_ssl_server_credentials(
                self._for_ports(),
                self._newer_for_ports,  # type: ignore[arg-type]  # None is: as before
                require_client_authentication=self.tls.is_mutual,
            ),
        )

    def explain(self, details: str | None) -> str:
        """The details of a failed call, led by what they mean if certificates are in the way."""
        words = handshake_words(details or "", self.tls)
        return f"{words} ({details})" if words else details or "no details"

    def _refresh(self) -> bool:
        """Read what was replaced; whether anything was."""
        if not self._files.changed():
            return False
        try:
            self._certificates = self._files.read(now=utc_now())
        except TrustError as error:
            _log.warning("the certificates read last are used on: %s", error)
            return False
        self._version += 1
        _log.info("the certificates were read again")
        return True

    def _for_channels(self) -> grpc.ChannelCredentials:
        self._refresh()
        found = self._certificates
        return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)

    def _for_ports(self) -> grpc.ServerCertificateConfiguration:
        found = self._certificates
        assert found.key is not None, "a port that encrypts has a key"
        assert found.cert is not None, "a port that encrypts has a certificate"
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)

    def _newer_for_ports(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at every handshake, on a thread of its own."""
        return self._for_ports() if self._refresh() else None


def _named(name: str) -> Options:
    """Have the other end's certificate be one for `name`, whatever address is dialled."""
    return (("grpc.ssl_target_name_override", name),) if name else ()

"""This process's certificates, checked when they are loaded, and readable handshake errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from equipoise.trust.errors import TrustError
from equipoise.trust.files import WatchedFiles
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import CLOCK_SKEW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files that belong together; None for those this process does not have."""

    ca: bytes | None = None
    """Certificate of the authority."""

    cert: bytes | None = None
    """This process's certificate, followed by intermediate certificates."""

    key: bytes | None = None
    """Private key of the certificate."""

    expires_s: Mapping[str, float] = field(default_factory=dict)
    """When the earliest certificate of `tls_ca` and of `tls_cert` expires, in Unix seconds."""


class CertificateFiles:
    """The files of `Tls`, which may be replaced at any time."""

    def __init__(self, tls: Tls) -> None:
        files = (("tls_ca", tls.tls_ca), ("tls_cert", tls.tls_cert), ("tls_key", tls.tls_key))
        self._paths = {setting: path for setting, path in files if path}
        self._files = WatchedFiles(tuple(self._paths.items()))

    def changed(self) -> bool:
        """Whether a file was replaced since the last successful `read`."""
        return self._files.changed()

    def read(self, *, now: datetime) -> Certificates:
        """Read the files and check that they can be used at `now`.

        Raises:
            TrustError: a file is missing, is not PEM, has expired, or does not match the others.
        """
        return self._files.read(lambda *texts: self._checked(texts, now=now))

    def _checked(self, contents: Sequence[bytes], *, now: datetime) -> Certificates:
        texts = dict(zip(self._paths, contents, strict=True))
        ca = self._certificates("tls_ca", texts.get("tls_ca"))
        chain = self._certificates("tls_cert", texts.get("tls_cert"))
        for setting, found in (("tls_ca", ca), ("tls_cert", chain[:1])):
            for certificate in found:
                self._check_dates(setting, certificate, now=now)
        if chain:
            self._check_key(chain[0], texts["tls_key"])
        if ca and chain:
            self._check_signed(chain, ca)
        return Certificates(
            ca=texts.get("tls_ca"),
            cert=texts.get("tls_cert"),
            key=texts.get("tls_key"),
            expires_s={
                setting: min(one.not_valid_after_utc.timestamp() for one in found)
                for setting, found in (("tls_ca", ca), ("tls_cert", chain))
                if found
            },
        )

    def _certificates(self, setting: str, text: bytes | None) -> Sequence[x509.Certificate]:
        if text is None:
            return ()
        try:
            return x509.load_pem_x509_certificates(text)
        except ValueError as error:
            raise TrustError(f"{self._named(setting)} contains no PEM certificate") from error

    def _check_dates(self, setting: str, certificate: x509.Certificate, *, now: datetime) -> None:
        if certificate.not_valid_after_utc < now:
            ended = certificate.not_valid_after_utc
            raise TrustError(f"{self._named(setting)} expired on {ended:%Y-%m-%d}: renew it")
        if certificate.not_valid_before_utc > now + timedelta(seconds=CLOCK_SKEW_S):
            begins = certificate.not_valid_before_utc
            raise TrustError(
                f"{self._named(setting)} is not valid before {begins:%Y-%m-%d %H:%M} UTC: "
                "check this machine's clock"
            )

    def _check_key(self, certificate: x509.Certificate, key: bytes) -> None:
        try:
            public = load_pem_private_key(key, password=None).public_key()
        except (TypeError, ValueError) as error:
            raise TrustError(
                f"{self._named('tls_key')} contains no unencrypted PEM private key"
            ) from error
        form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
            raise TrustError(
                f"{self._named('tls_key')} is not the key of {self._named('tls_cert')}"
            )

    def _check_signed(
        self, chain: Sequence[x509.Certificate], ca: Sequence[x509.Certificate]
    ) -> None:
        """Check that the authority signed a certificate of the chain; peers verify it in full."""
        for certificate in chain:
            for authority in ca:
                try:
                    certificate.verify_directly_issued_by(authority)
                except (ValueError, TypeError, InvalidSignature):
                    continue
                return
        raise TrustError(
            f"{self._named('tls_cert')} is not signed by the authority in {self._named('tls_ca')}: "
            "a fleet's certificates need one authority"
        )

    def _named(self, setting: str) -> str:
        return f"{setting} {self._paths[setting]}"


_OTHER_ROLE = (
    "its certificate does not have the expected name of its role: issue it with that name, or set "
    "tls_balancer_name or tls_worker_name"
)
EXPLANATIONS = (
    ("certificate has expired", "its certificate has expired: renew it"),
    ("certificate is not yet valid", "its certificate is not valid yet: check both clocks"),
    ("unable to get local issuer", "its certificate is not signed by this process's tls_ca"),
    ("self signed certificate", "its certificate is not signed by this process's tls_ca"),
    ("self-signed certificate", "its certificate is not signed by this process's tls_ca"),
    ("WRONG_VERSION_NUMBER", "it uses plain text but this process uses TLS: remove tls_ca here"),
    ("Hostname Verification", _OTHER_ROLE),
    ("Peer name", _OTHER_ROLE),
)
"""What a part of gRPC's or BoringSSL's words about a handshake means."""

_CLOSED = ("Socket closed", "Connection reset", "recvmsg", "Endpoint closing")


def explain_handshake(details: str, tls: Tls) -> str:
    """The certificate problem behind gRPC's details of a failed call; empty if there is none."""
    for mark, explanation in EXPLANATIONS:
        if mark in details:
            return explanation
    if "failed to connect" not in details or not any(mark in details for mark in _CLOSED):
        return ""
    if not tls.tls_ca:
        return "it closed the connection: it may require TLS: set tls_ca here"
    if not tls.tls_cert:
        return "it closed the connection: it may require a certificate: set tls_cert and tls_key"
    return "it closed the connection: it may not trust the authority of this process's tls_cert"

"""Certificates of our own, checked before anybody relies on them, and handshakes in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM texts that fit each other; None for what this process has not."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None


class CertificateFiles:
    """The files of `Tls`, read again after they were replaced."""

    def __init__(self, tls: Tls) -> None:
        given = (("tls_ca", tls.tls_ca), ("tls_cert", tls.tls_cert), ("tls_key", tls.tls_key))
        self._paths = {setting: path for setting, path in given if path}
        self._files = WatchedFiles(tuple(self._paths.items()))

    def changed(self) -> bool:
        """Whether a file was replaced since `read`."""
        return self._files.changed()

    def read(self, *, now: datetime) -> Certificates:
        """What the files say, if it can be used at `now`.

        Raises:
            TrustError: a file is missing, is no PEM, has expired, or does not fit the others.
        """
        texts = dict(zip(self._paths, self._files.read(), strict=True))
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
            ca=texts.get("tls_ca"), cert=texts.get("tls_cert"), key=texts.get("tls_key")
        )

    def _certificates(self, setting: str, text: bytes | None) -> Sequence[x509.Certificate]:
        if text is None:
            return ()
        try:
            return x509.load_pem_x509_certificates(text)
        except ValueError as error:
            raise TrustError(f"{self._named(setting)} has no certificate in PEM form") from error

    def _check_dates(self, setting: str, certificate: x509.Certificate, *, now: datetime) -> None:
        if certificate.not_valid_after_utc < now:
            ended = certificate.not_valid_after_utc
            raise TrustError(f"{self._named(setting)} has expired on {ended:%Y-%m-%d}: renew it")
        if certificate.not_valid_before_utc > now:
            begins = certificate.not_valid_before_utc
            raise TrustError(
                f"{self._named(setting)} is valid from {begins:%Y-%m-%d %H:%M} UTC on only: is "
                "this machine's clock right?"
            )

    def _check_key(self, certificate: x509.Certificate, key: bytes) -> None:
        try:
            public = load_pem_private_key(key, password=None).public_key()
        except (TypeError, ValueError) as error:
            raise TrustError(
                f"{self._named('tls_key')} has no private key in PEM form without a password"
            ) from error
        form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
            raise TrustError(
                f"{self._named('tls_key')} is not the key of {self._named('tls_cert')}"
            )

    def _check_signed(
        self, chain: Sequence[x509.Certificate], ca: Sequence[x509.Certificate]
    ) -> None:
        """Whether some certificate of the chain is by the authority; peers check it in full."""
        for certificate in chain:
            for authority in ca:
                try:
                    certificate.verify_directly_issued_by(authority)
                except (ValueError, TypeError, InvalidSignature):
                    continue
                return
        raise TrustError(
            f"{self._named('tls_cert')} is not signed by the authority in {self._named('tls_ca')}: "
            "all of a fleet have the same authority"
        )

    def _named(self, setting: str) -> str:
        return f"{setting} {self._paths[setting]}"


def utc_now() -> datetime:
    """What certificates are checked against."""
    return datetime.now(UTC)


_FINDINGS = (
    ("certificate has expired", "its certificate has expired: renew it"),
    ("certificate is not yet valid", "its certificate is not valid yet: compare the clocks"),
    ("unable to get local issuer", "its certificate is not signed by our tls_ca"),
    ("self signed certificate", "its certificate is not signed by our tls_ca"),
    ("self-signed certificate", "its certificate is not signed by our tls_ca"),
    ("WRONG_VERSION_NUMBER", "it speaks plain text, we speak TLS: leave out our tls_ca"),
    ("Hostname Verification", "its certificate is not for the host that was dialled"),
    ("Peer name", "its certificate is not for the host that was dialled"),
)
_CLOSED = ("Socket closed", "Connection reset", "recvmsg", "Endpoint closing")


def handshake_words(details: str, tls: Tls) -> str:
    """What gRPC's details of a failed call mean in terms of certificates; empty if nothing."""
    for mark, words in _FINDINGS:
        if mark in details:
            return words
    if "failed to connect" not in details or not any(mark in details for mark in _CLOSED):
        return ""
    if not tls.tls_ca:
        return "it closed the connection: it may speak TLS, which needs our tls_ca"
    if not tls.tls_cert:
        return "it closed the connection: it may want a certificate, give tls_cert and tls_key"
    return "it closed the connection: it may not trust the authority of our tls_cert"

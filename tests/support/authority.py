"""A fleet's certificates and signing keys, made for a test."""

import ipaddress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from equipoise.trust.settings import Tls

_DAY = timedelta(days=1)
_CA_USES = {"key_cert_sign", "crl_sign"}
_USES = _CA_USES | {
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "encipher_only", "decipher_only"),
}


class Authority:
    """Signs certificates into a folder, for 127.0.0.1 by default."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"authority {id(self)}")
        now = datetime.now(UTC)
        made = self._signed(
            self._name,
            self._key.public_key(),
            since=now - _DAY,
            until=now + _DAY,
            extensions=(
                x509.BasicConstraints(ca=True, path_length=None),
                x509.KeyUsage(**{use: use in _CA_USES for use in _USES}),
            ),
        )
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(made.public_bytes(Encoding.PEM))

    def issue(self, name, *, hosts=None, uri=None, expired=False, begins=None):
        """Return `Tls` for this common name; a repeated call replaces the files.

        By default the certificate names this machine and the role, as servers need.
        """
        if hosts is None:
            hosts = ("127.0.0.1", "localhost", f"{name.partition('/')[0]}.equipoise")
        key = ec.generate_private_key(ec.SECP256R1())
        until = datetime.now(UTC) + _DAY
        if expired:
            until = datetime(2020, 2, 1, tzinfo=UTC)
        names = [_host(host) for host in hosts]
        names += [x509.UniformResourceIdentifier(uri)] if uri else []
        made = self._signed(
            _named(name),
            key.public_key(),
            since=begins or until - 2 * _DAY,
            until=until,
            extensions=(x509.SubjectAlternativeName(names),),
        )
        stem = name.replace("/", "-")
        cert, private = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        cert.write_bytes(made.public_bytes(Encoding.PEM))
        return Tls(tls_ca=str(self.ca_file), tls_cert=str(cert), tls_key=str(private))

    def _signed(self, name, public_key, *, since, until, extensions):
        """With the identifiers of both keys, which clients of Python 3.13 and later require."""
        issuer = self._key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False
            )
        )
        for one in extensions:
            is_critical = not isinstance(one, x509.SubjectAlternativeName)
            builder = builder.add_extension(one, critical=is_critical)
        return builder.sign(self._key, hashes.SHA256())


def write_key(folder, identity):
    """A signing key's file, and the line that accepts it; a repeated call replaces the key."""
    key = ed25519.Ed25519PrivateKey.generate()
    path = folder / f"{identity.replace('/', '-')}.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return str(path), f"{identity} {public.decode().splitlines()[1]}\n"


def write_keys(folder, *identities):
    """Files of signing keys by identity, and the file that accepts them all."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {identity: write_key(folder, identity) for identity in identities}
    accepted = folder / "accepted"
    accepted.write_text("".join(line for _, line in keys.values()))
    return {identity: path for identity, (path, _) in keys.items()}, accepted


def _named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host):
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

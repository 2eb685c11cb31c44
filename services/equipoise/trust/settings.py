"""`Tls`: the certificate options that every process shares. Reads no file."""

from dataclasses import dataclass, field
from typing import Any

from equipoise.settings.address import parse_address
from equipoise.trust.errors import TrustError

BALANCER_NAME = "balancer.equipoise"
"""DNS name that the certificate of every balancer has, and no other certificate."""

WORKER_NAME = "worker.equipoise"
"""DNS name that the certificate of every worker has, and no other certificate."""

TRUST_DOMAIN = "cluster.local"
"""Trust domain of identities where none is set; cert-manager's default."""


def or_environment(variable: str, *, default: str | bool = "") -> Any:
    """A field whose default comes from an environment variable.

    All commands of a machine, or of a pod, then present the same credentials without options.
    """
    return field(default=default, metadata={"environment": variable})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates of one process. None means plain text, on loopback or with `insecure`.

    Raises:
        TrustError: a certificate without its key, a key without its certificate, or certificates
            together with `insecure`.
    """

    tls_ca: str = or_environment("EQUIPOISE_TLS_CA")
    """PEM file of the certificate authority that signs this fleet's certificates. A server that
    has it and a certificate of its own requires client certificates. Reloaded when it changes."""

    tls_cert: str = or_environment("EQUIPOISE_TLS_CERT")
    """PEM file of this process's certificate, followed by intermediate certificates. Reloaded when
    it changes."""

    tls_key: str = or_environment("EQUIPOISE_TLS_KEY")
    """PEM file of the certificate's private key. Reloaded when it changes."""

    tls_trust_domain: str = or_environment("EQUIPOISE_TLS_TRUST_DOMAIN", default=TRUST_DOMAIN)
    """Trust domain of this fleet. Only URIs spiffe://DOMAIN/equipoise/... in certificates name a
    role; a certificate with a spiffe URI of another domain has none."""

    insecure: bool = or_environment("EQUIPOISE_INSECURE", default=False)
    """Allow plain text beyond loopback. Anyone on the network can then read or change the traffic,
    and make every call that needs no token. Use it only on networks that encrypt traffic."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise TrustError("tls_cert and tls_key go together: set both or neither")
        if self.insecure and (self.tls_ca or self.tls_cert):
            raise TrustError("insecure means plain text: remove it, or remove the tls files")

    @property
    def serves_tls(self) -> bool:
        """Whether this process's ports use TLS."""
        return bool(self.tls_cert)

    @property
    def is_mutual(self) -> bool:
        """Whether this process's ports require client certificates."""
        return bool(self.tls_ca and self.tls_cert)

    def check_listen(self, address: str) -> None:
        """Check that this process may listen on `address`, host:port.

        Raises:
            TrustError: the port would accept plain text from other machines without `insecure`.
        """
        if self.tls_ca and not self.tls_cert:
            raise TrustError("listening with tls_ca also needs tls_cert and tls_key")
        if not self.serves_tls and not self.insecure and not is_loopback(address):
            raise TrustError(
                f"other machines can reach {address}: add --tls-ca, --tls-cert and --tls-key, or "
                "--insecure if the network itself is trusted"
            )

    def check_dial(self, address: str) -> None:
        """Check that this process may connect to `address`, host:port.

        Raises:
            TrustError: plain text would leave this machine without `insecure`.
        """
        if not self.tls_ca and not self.insecure and not is_loopback(address):
            raise TrustError(
                f"{address} is on another machine: add --tls-ca to use TLS, or --insecure if the "
                "network itself is trusted"
            )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach host:port; False for anything else."""
    try:
        return parse_address(address).is_loopback
    except ValueError:
        return False

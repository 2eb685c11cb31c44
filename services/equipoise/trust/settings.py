"""What a person may choose about trust; parts of other settings. Reads no file."""

import ipaddress
from dataclasses import dataclass, field
from typing import Any

from equipoise.trust.errors import TrustError


def or_environment(variable: str, *, default: str | bool = "") -> Any:
    """A setting that, where it is not given, is what a variable of the environment says.

    So all commands of one machine, or of one pod, prove who asks without an option.
    """
    return field(default=default, metadata={"environment": variable})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates of one process; none means plain text, on loopback or where that is said.

    Raises:
        TrustError: a certificate without its key, or the other way round.
    """

    tls_ca: str = or_environment("EQUIPOISE_TLS_CA")
    """PEM file of the authority that signs this fleet's certificates. With a certificate of its
    own, a server then asks every caller for one. Files are read again when they change."""

    tls_cert: str = or_environment("EQUIPOISE_TLS_CERT")
    """PEM file of this process's certificate, intermediate ones behind it."""

    tls_key: str = or_environment("EQUIPOISE_TLS_KEY")
    """PEM file of the certificate's private key."""

    insecure: bool = or_environment("EQUIPOISE_INSECURE", default=False)
    """Speak plain text beyond this machine too: whoever reaches the port may do anything that
    needs no token, and reads and changes what is said. For networks that encrypt by themselves."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise TrustError("tls_cert and tls_key go together: give both or neither")
        if self.insecure and (self.tls_ca or self.tls_cert):
            raise TrustError("insecure means plain text: leave it out, or the tls files")

    @property
    def serves_tls(self) -> bool:
        """Whether ports of this process encrypt."""
        return bool(self.tls_cert)

    @property
    def is_mutual(self) -> bool:
        """Whether ports of this process ask callers for a certificate."""
        return bool(self.tls_ca and self.tls_cert)

    def check_listen(self, address: str) -> None:
        """See that a port may be opened at `address`, host:port.

        Raises:
            TrustError: it would speak plain text with other machines, which nobody asked for.
        """
        if self.tls_ca and not self.tls_cert:
            raise TrustError("a port needs tls_cert and tls_key beside tls_ca")
        if not self.serves_tls and not self.insecure and not is_loopback(address):
            raise TrustError(
                f"{address} can be reached from other machines: give it --tls-ca, --tls-cert and "
                "--tls-key, or say --insecure where the network itself is trusted"
            )

    def check_dial(self, address: str) -> None:
        """See that `address`, host:port, may be dialled.

        Raises:
            TrustError: plain text would leave this machine, which nobody asked for.
        """
        if not self.tls_ca and not self.insecure and not is_loopback(address):
            raise TrustError(
                f"{address} is another machine: give --tls-ca to speak TLS with it, or say "
                "--insecure where the network itself is trusted"
            )


def is_loopback(address: str) -> bool:
    """Whether host:port is of this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

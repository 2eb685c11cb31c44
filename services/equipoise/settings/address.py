"""host:port: the one parser, for settings, files and messages."""

import ipaddress
from typing import NamedTuple

from equipoise.settings.errors import InvalidSettingsError

_MAX_HOST_LENGTH = 253
_MAX_SHOWN = 60


class Address(NamedTuple):
    """A host and a port; `str()` gives host:port."""

    host: str
    """Name or IP address; an IPv6 address may have brackets."""

    port: int
    """0 to 65535; 0 asks the operating system for a free port."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def bare_host(self) -> str:
        """The host without brackets, as the socket functions expect it."""
        return self.host.strip("[]")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.bare_host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str, *, min_port: int = 0) -> Address:
    """Split host:port.

    Raises:
        ValueError: it is not host:port, or the port is below `min_port`. The message continues a
            sentence that begins with the address's name.
    """
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not (is_number and min_port <= int(port) < 2**16 and _is_host(host)):
        shown = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
        raise ValueError(f"must be host:port with a port from {min_port} to 65535, not {shown!r}")
    return Address(host, int(port))


def listen_address(setting: str, text: str) -> Address:
    """The address in a setting to listen on; port 0 takes a free port.

    Raises:
        InvalidSettingsError: it is not host:port.
    """
    return _address_of(setting, text, min_port=0)


def dial_address(setting: str, text: str) -> Address:
    """The address in a setting to connect to.

    Raises:
        InvalidSettingsError: it is not host:port, or the port is 0.
    """
    return _address_of(setting, text, min_port=1)


def _address_of(setting: str, text: str, *, min_port: int) -> Address:
    try:
        return parse_address(text, min_port=min_port)
    except ValueError as error:
        raise InvalidSettingsError(f"{setting} {error}") from None


def _is_host(text: str) -> bool:
    """Whether it may be a name or an IP address. Names of other scripts are in DNS as ASCII."""
    return (
        0 < len(text) <= _MAX_HOST_LENGTH
        and text.isascii()
        and all(character.isalnum() or character in "-_.:[]%" for character in text)
    )

"""`AskSettings`: which balancer is asked, about which pool, and how one proves who asks."""

from dataclasses import dataclass, field

from equipoise.cli.live.access import Access
from equipoise.cli.options import ENVIRONMENT

ADDRESS_VARIABLE = "EQUIPOISE_ADDRESS"
"""Environment variable that is used where --address is not given."""


class InvalidSettingsError(ValueError):
    """A setting outside its range; the message names the setting, the value and the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSettings:
    """What every question and order to a balancer has.

    Raises:
        InvalidSettingsError: a value is outside its range.
    """

    address: str = field(default="127.0.0.1:7070", metadata={ENVIRONMENT: ADDRESS_VARIABLE})
    """host:port of a balancer; one that follows names the one that leads, which is asked then."""

    pool: str = ""
    """Pool that is meant; needed only when the balancer has several."""

    json: bool = False
    """Print JSON for programs."""

    timeout_s: float = 5.0
    """Seconds to wait for the balancer's answer."""

    access: Access = field(default_factory=Access)
    """How to prove who asks."""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidSettingsError(f"address must be host:port, not {self.address!r}")
        if not 0 < self.timeout_s <= 3600:
            raise InvalidSettingsError(
                f"timeout_s must be above 0 and at most 3600, not {self.timeout_s}"
            )

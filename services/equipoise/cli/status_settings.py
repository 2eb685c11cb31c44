"""`StatusSettings`: what a person may ask a balancer for. Starts nothing."""

from dataclasses import dataclass, field

from equipoise.cli.access import Access


class InvalidSettingsError(ValueError):
    """A setting outside its range; the message names the setting, the value and the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    """One look at a pool, or a long one.

    Raises:
        InvalidSettingsError: a value is outside its range.
    """

    address: str = "127.0.0.1:7070"
    """host:port of the balancer."""

    pool: str = ""
    """Pool to show; needed only when the balancer has several."""

    watch: bool = False
    """Go on showing what changes, until Ctrl-C."""

    json: bool = False
    """Print JSON for programs: one object, or one a line with --watch."""

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

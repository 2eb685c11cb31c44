"""`AskSettings`: which balancer is asked, about which pool, and how one proves who asks."""

from dataclasses import dataclass, field
from typing import Annotated

from equipoise.cli.live.access import Access
from equipoise.cli.options import ENVIRONMENT
from equipoise.settings.address import dial_address
from equipoise.settings.fields import HOUR_S, Range, check_ranges

ADDRESS_VARIABLE = "EQUIPOISE_ADDRESS"
"""Environment variable that is used where --address is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSettings:
    """What every question and order to a balancer has.

    Raises:
        InvalidSettingsError: a value is out of range.
    """

    address: str = field(default="127.0.0.1:7070", metadata={ENVIRONMENT: ADDRESS_VARIABLE})
    """host:port of a balancer; one that follows names the one that leads, which is asked then."""

    pool: str = ""
    """Pool that is meant; needed only when the balancer has several."""

    json: bool = False
    """Print JSON for programs."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 5.0
    """Seconds to wait for the balancer's answer."""

    access: Access = field(default_factory=Access)
    """How to prove who asks."""

    def __post_init__(self) -> None:
        dial_address("address", self.address)
        check_ranges(self)

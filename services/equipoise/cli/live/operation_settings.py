"""What a person may order a balancer to do. Starts nothing."""

from dataclasses import dataclass, field
from typing import Annotated

from equipoise.cli.live.ask_settings import AskSettings
from equipoise.cli.options import REPEATED
from equipoise.planning.policy import Algorithm
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings(AskSettings):
    """One order, and to whom."""

    reason: str = ""
    """Why, for the audit and for whoever reads the status."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 210.0
    """Seconds to wait for the balancer's answer. Whoever waits less than the balancer, which does
    so for three plan timeouts of its policy and 20 s, does not hear what is done afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings(OrderSettings):
    """`equipoise rebalance`."""

    force: bool = False
    """Adopt the plan unless it is worse on the latest window, however little it gains."""

    all_pools: bool = False
    """Plan in every pool; the answer of each is shown when it comes. The time to wait for answers
    is for all of them together: what has not begun by then is not done."""

    def __post_init__(self) -> None:
        OrderSettings.__post_init__(self)
        if self.all_pools and self.pool:
            raise InvalidSettingsError(f"all pools, or {self.pool!r}? Leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackSettings(OrderSettings):
    """`equipoise rollback`."""

    generation: Annotated[int, Range(0, 2**53)] = 0
    """Committed generation whose placement is wanted; 0 is the one before the latest plan."""

    keep_planning: bool = False
    """Go on planning; otherwise the pool is paused, because the next plan would undo it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSettings(OrderSettings):
    """`equipoise pin`."""

    generation: Annotated[int, Range(0, 2**53)] = 0
    """Committed generation whose placement is kept; 0 is the one that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewSettings(OrderSettings):
    """`equipoise preview`."""

    set: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """A number of the policy that differs from the pool's own, like min_gain=0.01; may be given
    several times."""

    algorithm: str = ""
    """Algorithm in place of the pool's own."""

    def __post_init__(self) -> None:
        OrderSettings.__post_init__(self)
        if self.algorithm and self.algorithm not in tuple(Algorithm):
            raise InvalidSettingsError(
                f"algorithm must be one of {', '.join(Algorithm)}, not {self.algorithm!r}"
            )
        self.policy()

    def policy(self) -> dict[str, float]:
        """The numbers by name.

        Raises:
            InvalidSettingsError: one is not NAME=NUMBER.
        """
        numbers = {}
        for words in self.set:
            name, _, number = words.partition("=")
            try:
                numbers[name.strip().replace("-", "_")] = float(number)
            except ValueError:
                raise InvalidSettingsError(
                    f"set wants NAME=NUMBER, like min_gain=0.01, not {words!r}"
                ) from None
        return numbers

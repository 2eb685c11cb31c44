"""Settings of the commands that talk to a running balancer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from equipoise.cli.options import ARGUMENT, ENVIRONMENT, REPEATED
from equipoise.formats.format import Format
from equipoise.planning.policy import Algorithm
from equipoise.settings.address import dial_address
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import HOUR_S, Range, check_ranges
from equipoise.trust.settings import BALANCER_NAME, Tls, or_environment

ADDRESS_VARIABLE = "EQUIPOISE_ADDRESS"
"""Environment variable that replaces the default of --address."""

BALANCER_NAME_VARIABLE = "EQUIPOISE_TLS_BALANCER_NAME"
"""Environment variable that replaces the default of --tls-balancer-name."""

_IMAGES = {".png", ".svg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The credentials that a command presents to a balancer."""

    tls: Tls = field(default_factory=Tls)
    """Certificates for the connection."""

    tls_balancer_name: str = or_environment(BALANCER_NAME_VARIABLE, default=BALANCER_NAME)
    """DNS name in every balancer's certificate and in no other; verified instead of the
    address."""

    signing_key: str = or_environment("EQUIPOISE_SIGNING_KEY")
    """PEM file with the Ed25519 key that signs a token for each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerClientSettings:
    """Which balancer and pool a command is about.

    Raises:
        InvalidSettingsError: a value is out of range.
    """

    address: str = field(default="127.0.0.1:7070", metadata={ENVIRONMENT: ADDRESS_VARIABLE})
    """host:port of any balancer of the fleet. A follower redirects to the leader."""

    pool: str = ""
    """Pool. Required only if the balancer has several."""

    json: bool = False
    """Print JSON."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 5.0
    """Seconds to wait for the balancer's answer."""

    access: Access = field(default_factory=Access)
    """Credentials."""

    def __post_init__(self) -> None:
        dial_address("address", self.address)
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings(BalancerClientSettings):
    """`equipoise status`."""

    watch: bool = False
    """Keep updating until Ctrl-C. With --json, print one object per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsSettings(BalancerClientSettings):
    """`equipoise decisions`."""

    limit: Annotated[int, Range(1, 1000)] = 20
    """Number of decisions to show, newest first."""

    follow: bool = False
    """Keep printing new decisions, oldest first, until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings(BalancerClientSettings):
    """`equipoise audit`."""

    limit: Annotated[int, Range(1, 1000)] = 20
    """Number of audit records to show, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsSettings(BalancerClientSettings):
    """`equipoise loads`."""

    out: Path | None = None
    """Write an image instead, .png or .svg."""

    top: Annotated[int, Range(0, 100)] = 3
    """Number of busiest experts to list for each layer."""

    def __post_init__(self) -> None:
        BalancerClientSettings.__post_init__(self)
        if self.out is not None and self.out.suffix.lower() not in _IMAGES:
            raise InvalidSettingsError(f"out must end in .png or .svg, not {self.out.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutShowSettings(BalancerClientSettings):
    """`equipoise layout show`."""

    generation: Annotated[int, Range(0, 2**53)] = 0
    """Generation to show. 0 is the committed one."""

    layer: int | None = None
    """Show the slots of this MoE layer, rank by rank, instead of one line per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDiffSettings(BalancerClientSettings):
    """`equipoise layout diff`."""

    before: str = field(metadata={ARGUMENT: True})
    """Generation, or a layout file in any engine's format."""

    after: str = field(default="0", metadata={ARGUMENT: True})
    """Generation or file to compare with. Default: the committed generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutExportSettings(BalancerClientSettings):
    """`equipoise layout export`."""

    file: Path = field(metadata={ARGUMENT: True})
    """File to write."""

    format: Format = Format.EQUIPOISE
    """Format of the file."""

    generation: Annotated[int, Range(0, 2**53)] = 0
    """Generation to export. 0 is the committed one."""

    first_moe_layer: int | None = None
    """Index of the model's first MoE layer, for formats that number dense layers too."""

    watch: bool = False
    """Write the file again whenever another layout is committed, until Ctrl-C."""

    def __post_init__(self) -> None:
        BalancerClientSettings.__post_init__(self)
        if self.watch and self.generation:
            raise InvalidSettingsError(
                f"watch and generation {self.generation} cannot be combined: remove one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSettings(BalancerClientSettings):
    """What every operation has."""

    reason: str = ""
    """Reason to record with the request and show in the status."""

    timeout_s: Annotated[float, Range(0, HOUR_S, is_open=True)] = 210.0
    """Seconds to wait for the balancer's answer. An operation can take up to three times the
    policy's plan timeout plus 20 s; with a shorter wait it may complete after the command has timed
    out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutImportSettings(OperationSettings):
    """`equipoise layout import`."""

    file: Path = field(metadata={ARGUMENT: True})
    """Layout file that fits the pool."""

    file_format: Format | None = None
    """Format of the file. Default: detected from its content."""

    first_moe_layer: int | None = None
    """Index of the model's first MoE layer, for formats that number dense layers too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings(OperationSettings):
    """`equipoise rebalance`."""

    force: bool = False
    """Adopt the plan however small its gain, unless it is worse on the latest window."""

    all_pools: bool = False
    """Plan in every pool and print each answer as it arrives. The timeout covers all pools
    together; pools not reached by then are skipped."""

    def __post_init__(self) -> None:
        OperationSettings.__post_init__(self)
        if self.all_pools and self.pool:
            raise InvalidSettingsError(
                f"all_pools and pool {self.pool!r} cannot be combined: remove one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackSettings(OperationSettings):
    """`equipoise rollback`."""

    generation: Annotated[int, Range(0, 2**53)] = 0
    """Committed generation to restore. 0 is the one before the latest plan."""

    keep_planning: bool = False
    """Keep planning. By default the pool is paused, because the next plan would undo the
    rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSettings(OperationSettings):
    """`equipoise pin`."""

    generation: Annotated[int, Range(0, 2**53)] = 0
    """Committed generation to keep. 0 is the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewSettings(OperationSettings):
    """`equipoise preview`."""

    set: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """Policy value to override, like min_gain=0.01. Repeatable."""

    algorithm: Algorithm | None = None
    """Planning algorithm. Default: the pool's."""

    def __post_init__(self) -> None:
        OperationSettings.__post_init__(self)
        self.policy()

    def policy(self) -> dict[str, float]:
        """The overridden policy values by name.

        Raises:
            InvalidSettingsError: one is not NAME=NUMBER.
        """
        numbers = {}
        for override in self.set:
            name, _, number = override.partition("=")
            try:
                numbers[name.strip().replace("-", "_")] = float(number)
            except ValueError:
                raise InvalidSettingsError(
                    f"set must be NAME=NUMBER, like min_gain=0.01, not {override!r}"
                ) from None
        return numbers

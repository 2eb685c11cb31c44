"""Settings of `equipoise policy ...`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from equipoise.cli.live.settings import BalancerClientSettings
from equipoise.cli.options import ARGUMENT
from equipoise.formats.format import Format
from equipoise.planning.phase import Phase
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyValidateSettings:
    """`equipoise policy validate`."""

    file: Path = field(metadata={ARGUMENT: True})
    """BalancePolicy file, YAML or JSON."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShowSettings(PolicyValidateSettings):
    """`equipoise policy show`.

    Raises:
        InvalidSettingsError: a phase is given without a pool.
    """

    pool: str = ""
    """Pool to show. Default: all pools that the file distinguishes."""

    phase: Phase | None = None
    """Phase that the pool serves. Required if the file has policies by phase and none for the
    pool."""

    def __post_init__(self) -> None:
        _check_phase(self.phase, self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDiffSettings:
    """`equipoise policy diff`.

    Raises:
        InvalidSettingsError: a phase is given without a pool.
    """

    before: Path = field(metadata={ARGUMENT: True})
    """BalancePolicy file, YAML or JSON."""

    after: Path = field(metadata={ARGUMENT: True})
    """BalancePolicy file to compare it with."""

    pool: str = ""
    """Pool to compare. Default: all pools that the files distinguish."""

    phase: Phase | None = None
    """Phase that the pool serves. Required if a file has policies by phase and none for the
    pool."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        _check_phase(self.phase, self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPreviewSettings(BalancerClientSettings):
    """`equipoise policy preview`.

    Raises:
        InvalidSettingsError: a value is out of range, or options of recorded loads lack --loads.
    """

    file: Path = field(metadata={ARGUMENT: True})
    """BalancePolicy file, YAML or JSON."""

    loads: tuple[str, ...] = ()
    """Plan for these files of recorded loads instead of a running pool's loads."""

    phase: Phase | None = None
    """With --loads: phase that the pool serves. Required if the file has policies by phase and none
    for the pool."""

    current: Path | None = None
    """With --loads: file of the current layout."""

    current_format: Format | None = None
    """With --loads: format of the current layout. Default: detected from its content."""

    nodes: Annotated[int, Range(1)] = 1
    """With --loads: number of nodes."""

    ranks: Annotated[int | None, Range(1)] = None
    """With --loads: number of ranks. Required."""

    slots: Annotated[int | None, Range(1)] = None
    """With --loads: physical slots per layer."""

    groups: Annotated[int | None, Range(1)] = None
    """With --loads: number of expert groups."""

    model_config: Path | None = None
    """With --loads: the model's config.json."""

    def __post_init__(self) -> None:
        BalancerClientSettings.__post_init__(self)
        if self.loads and self.ranks is None:
            raise InvalidSettingsError("--loads needs the number of ranks: --ranks N")


def _check_phase(phase: Phase | None, pool: str) -> None:
    if phase is not None and not pool:
        raise InvalidSettingsError("phase is that of a pool: name the pool with --pool")

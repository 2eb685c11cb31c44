"""What a person may ask about layouts, loads, decisions and epochs. Starts nothing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from equipoise.cli.live.ask_settings import AskSettings
from equipoise.cli.live.operation_settings import OrderSettings
from equipoise.cli.options import ARGUMENT
from equipoise.formats.format import Format
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import Range

_PICTURES = {".png", ".svg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsSettings(AskSettings):
    """`equipoise decisions`."""

    limit: Annotated[int, Range(1, 1000)] = 20
    """Most decisions to show, the newest ones."""

    follow: bool = False
    """Go on with each new one, oldest first, until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsSettings(AskSettings):
    """`equipoise loads`."""

    out: Path | None = None
    """Picture to write instead, .png or .svg."""

    top: Annotated[int, Range(0, 100)] = 3
    """Busiest experts to name of each layer."""

    def __post_init__(self) -> None:
        AskSettings.__post_init__(self)
        if self.out is not None and self.out.suffix.lower() not in _PICTURES:
            raise InvalidSettingsError(f"out must end in .png or .svg, not {self.out.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutShowSettings(AskSettings):
    """`equipoise layout show`."""

    generation: int = 0
    """Generation to show; 0 is the committed one."""

    layer: int | None = None
    """MoE layer whose slots to show, rank by rank; without it, a line a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDiffSettings(AskSettings):
    """`equipoise layout diff`."""

    before: str = field(default="", metadata={ARGUMENT: True})
    """A generation, or a file of a layout in any engine's format."""

    after: str = field(default="", metadata={ARGUMENT: True})
    """Another one; the committed generation unless given."""

    def __post_init__(self) -> None:
        AskSettings.__post_init__(self)
        if not self.before:
            raise InvalidSettingsError("before must be a generation or a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutExportSettings(AskSettings):
    """`equipoise layout export`."""

    file: Path | None = field(default=None, metadata={ARGUMENT: True})
    """File to write."""

    format: Format = Format.EQUIPOISE
    """Whose format to write."""

    generation: int = 0
    """Generation to write; 0 is the committed one."""

    first_moe_layer: int | None = None
    """Layer of the model that its first MoE layer is, for formats that count all layers."""

    def __post_init__(self) -> None:
        AskSettings.__post_init__(self)
        if self.file is None:
            raise InvalidSettingsError("file must be named")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutImportSettings(OrderSettings):
    """`equipoise layout import`."""

    file: Path | None = field(default=None, metadata={ARGUMENT: True})
    """File of a layout that fits the pool."""

    file_format: Format | None = None
    """Its format; found by what is in it unless given."""

    first_moe_layer: int | None = None
    """Layer of the model that its first MoE layer is, for formats that count all layers."""

    def __post_init__(self) -> None:
        OrderSettings.__post_init__(self)
        if self.file is None:
            raise InvalidSettingsError("file must be named")

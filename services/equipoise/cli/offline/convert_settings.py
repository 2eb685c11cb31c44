"""`ConvertSettings`: what a person may ask of `equipoise convert`. Starts and reads nothing."""

from dataclasses import dataclass
from pathlib import Path

from equipoise.cli.offline.settings import ToolInputError
from equipoise.formats.format import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """One file of loads or of a layout, and the format it should have.

    Raises:
        ToolInputError: a file is not named.
    """

    file: Path | None = None
    """File to read: loads or a layout. Needed."""

    file_format: Format | None = None
    """Its format; found by what is in it unless given."""

    out: Path | None = None
    """File to write; for SGLang's loads .pt or .json, for TensorRT-LLM's a new folder. Needed."""

    format: Format = Format.EQUIPOISE
    """Whose format to write."""

    first_moe_layer: int | None = None
    """Layer of the model that its first MoE layer is, 3 in DeepSeek-V3; where one of the formats
    counts all layers and the other does not."""

    experts: int | None = None
    """Logical experts per layer that there must be."""

    ranks: int | None = None
    """Ranks of a layout, where the file does not say."""

    top_k: int | None = None
    """Experts that a token chooses, where a recording does not say; for TensorRT-LLM."""

    json: bool = False
    """Print JSON for programs."""

    def __post_init__(self) -> None:
        if self.file is None or self.out is None:
            raise ToolInputError("say which file to read and which to write: --file A --out B")
        for option in ("first_moe_layer", "experts", "ranks", "top_k"):
            value = getattr(self, option)
            least = 0 if option == "first_moe_layer" else 1
            if value is not None and value < least:
                name = option.replace("_", "-")
                raise ToolInputError(f"--{name} must be at least {least}, not {value}")

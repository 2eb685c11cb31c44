"""`equipoise convert`: loads or a layout from one engine's format to another's."""

from dataclasses import replace

from equipoise.cli.display import console, print_json
from equipoise.cli.offline.settings import ConvertSettings
from equipoise.formats.expected import Expected
from equipoise.formats.files import read_either, write_placement, write_recording
from equipoise.formats.placement import ExpertPlacement
from equipoise.formats.recording import Recording


def run(settings: ConvertSettings) -> int:
    """Read one file and write the other.

    Raises:
        FormatError: a file is invalid, or the target format needs more than the file contains.
    """
    known = Expected(
        num_experts=settings.experts,
        num_ranks=settings.ranks,
        first_moe_layer=settings.first_moe_layer,
    )
    content = read_either(settings.file, form=settings.file_format, expected=known)
    if isinstance(content, Recording):
        if settings.top_k is not None:
            content = replace(content, top_k=settings.top_k)
        write_recording(content, settings.out, form=settings.format)
    else:
        write_placement(content, settings.out, form=settings.format)
    facts = _facts(content)
    if settings.json:
        print_json({**facts, "out": str(settings.out), "format": settings.format})
    else:
        listed = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        console().print(f"wrote {settings.out} ({settings.format} format): {listed}")
    return 0


def _facts(content: Recording | ExpertPlacement) -> dict[str, int | str | None]:
    facts: dict[str, int | str | None] = {
        "kind": "loads" if isinstance(content, Recording) else "layout",
        "layers": content.num_layers,
        "experts": content.num_experts,
        "first_moe_layer": content.first_moe_layer,
    }
    if isinstance(content, Recording):
        return {**facts, "windows": content.num_windows}
    return {**facts, "slots": content.num_slots, "ranks": content.num_ranks}

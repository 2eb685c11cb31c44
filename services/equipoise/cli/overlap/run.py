"""`equipoise overlap`: read a trace, measure it, print a table or JSON, draw a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from equipoise.cli.display import console, format_count, print_json
from equipoise.cli.overlap.analysis import Overlap, Times, analyse
from equipoise.cli.overlap.names import COMMUNICATION, EXPERTS, Names
from equipoise.cli.overlap.settings import OverlapSettings
from equipoise.cli.overlap.timeline import Timeline
from equipoise.formats.errors import naming
from equipoise.formats.trace import read_slices


def run(settings: OverlapSettings) -> int:
    """Measure the overlap of a trace and show it.

    Raises:
        FormatError: the trace cannot be used, or the image cannot be written.
        InvalidSettingsError: a regular expression is invalid.
    """
    names = Names(
        communication=COMMUNICATION if settings.communication is None else settings.communication,
        experts=EXPERTS if settings.experts is None else settings.experts,
    )
    with naming(settings.trace):
        overlap = analyse(Timeline.of(read_slices(settings.trace), names))
    notes = _notes(overlap, settings)
    if settings.plot is not None:
        from equipoise.cli.plots import draw_overlap

        draw_overlap(overlap, settings.plot, title=settings.trace.name)
    if settings.json:
        print_json(document_of(overlap) | {"notes": list(notes)})
    else:
        _show(overlap, notes)
    return 0


def document_of(overlap: Overlap) -> dict[str, Any]:
    """The figures as JSON has them, without notes; times in microseconds."""
    return {
        "timeline": "device" if overlap.on_device else "host",
        "processes": overlap.num_processes,
        "steps": overlap.num_steps,
        "span_us": overlap.span_us,
        "step_us": overlap.step_us,
        "busy_us": overlap.busy_us,
        "idle_us": overlap.idle_us,
        **_figures(overlap.times),
        "experts_share_of_step": overlap.experts_share,
        "layers": [{"layer": layer, **_figures(times)} for layer, times in overlap.layers],
        "tracks": [
            {
                "process": one.process,
                "track": one.track,
                "slices": one.num_slices,
                **_figures(one.times),
            }
            for one in overlap.tracks
        ],
    }


def _figures(times: Times) -> dict[str, float | None]:
    return {**asdict(times), "hidden_us": times.hidden_us, "hidden_share": times.hidden_share}


def _show(overlap: Overlap, notes: Sequence[str]) -> None:
    out, times = console(), overlap.times
    kind, tracks = ("device", "stream") if overlap.on_device else ("process", "thread")
    steps = f", {format_count(overlap.num_steps, 'step')}" if overlap.num_steps else ""
    out.print(
        f"{format_count(overlap.num_processes, kind)}, "
        f"{format_count(len(overlap.tracks), tracks)}{steps}\n"
    )
    summary = _table("", "µs", "% of span")
    for name, value in (
        ("span", overlap.span_us),
        ("busy", overlap.busy_us),
        ("computation", times.computation_us),
        ("  experts", times.experts_us),
        ("  attention", times.attention_us),
        ("communication", times.communication_us),
        ("  hidden", times.hidden_us),
        ("  exposed", times.exposed_us),
        ("copies", times.copies_us),
        ("idle", overlap.idle_us),
    ):
        summary.add_row(name, _us(value), f"{value / overlap.span_us:.1%}")
    out.print(summary)
    out.print(f"\nhidden share of communication: {_share(times.hidden_share)}")
    each = ""
    if overlap.num_steps:
        each = f" (a step takes {_us(overlap.step_us / overlap.num_steps)} µs on average)"
    out.print(f"experts' share of a step: {overlap.experts_share:.1%}{each}")
    if overlap.layers:
        out.print("\nby layer, in µs over the whole trace:")
        out.print(_breakdown("layer", [((str(layer),), one) for layer, one in overlap.layers]))
    else:
        out.print('no range names a layer ("layer 3"): nothing is shown by layer')
    out.print(f"\nby {tracks}, in µs:")
    rows = [((f"{row.process} {row.track}",), row.times) for row in overlap.tracks]
    out.print(_breakdown(f"{kind}, {tracks}", rows))
    for note in notes:
        out.print(f"note: {note}")


def _notes(overlap: Overlap, settings: OverlapSettings) -> tuple[str, ...]:
    """What makes the figures doubtful, and what the options match nothing of."""
    found = (
        ("--communication", settings.communication, overlap.times.communication_us),
        ("--experts", settings.experts, overlap.times.experts_us),
    )
    unmatched = (
        f"no name of work matches {option} {pattern!r}"
        for option, pattern, time_us in found
        if pattern is not None and not time_us
    )
    return (*unmatched, *overlap.notes)


def _breakdown(what: str, rows: list[tuple[tuple[str], Times]]) -> Table:
    columns = ("computation", "experts", "attention", "communication", "exposed", "hidden %")
    table = _table(what, *columns)
    for name, one in rows:
        figures = (
            one.computation_us, one.experts_us, one.attention_us, one.communication_us,
            one.exposed_us,
        )  # fmt: skip
        table.add_row(*name, *map(_us, figures), _share(one.hidden_share))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _us(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

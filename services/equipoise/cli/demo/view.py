"""A running demo on the screen: a live picture on a terminal, lines elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from equipoise.cli.demo.result import (
    DRIFTED_MAX_OVER_MEAN,
    RECOVERED_MAX_OVER_MEAN,
    Latency,
)
from equipoise.cli.live.ranks import ranks_view
from equipoise_api.v1 import status_pb2

_BARS = "▁▂▃▄▅▆▇█"
_HIGHEST_BAR = 2.2  # rank max/mean of the tallest bar
_NUM_BARS = 64
_NUM_DECISIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A change of traffic."""

    at_s: float
    """When it happened, Unix seconds."""

    domain: str
    """Kind of text of requests from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One moment of the demo. Sequences are in order of time."""

    elapsed_s: float
    """Time since the start."""
    activity: str
    """What the demo is doing."""
    status: status_pb2.PoolStatus | None
    """Status of the pool, once it exists."""
    windows: Sequence[status_pb2.WindowStatus]
    """Closed windows."""
    decisions: Sequence[status_pb2.Decision]
    """Decisions."""
    marks: Sequence[Mark]
    """Changes of traffic."""
    tokens_per_s: float
    """Recent throughput."""
    latency: Latency
    """Recent inter-token latency."""
    requests: int
    """Requests completed."""
    failed_requests: int
    """Requests failed."""
    tokens_compared: int
    """Tokens compared with the reference."""
    tokens_identical: int
    """Tokens equal to the reference."""
    references_ready: int
    """Prompts that the reference model has completed."""
    references_total: int
    """All prompts."""
    memory_bytes: int
    """Resident memory of all processes."""


class LiveScreen:
    """Redraws one picture in place; messages scroll by above it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def say(self, text: str, *, at_s: float) -> None:
        """Print a message."""
        self._live.console.print(Text(f"{at_s:5.0f} s  {text}"), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        """Redraw the picture."""
        self._live.update(picture(scene), refresh=True)


class PlainScreen:
    """Prints one line per message, window and decision."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._windows_shown = 0
        self._decisions_shown = 0

    def say(self, text: str, *, at_s: float) -> None:
        """Print a message."""
        self._console.print(Text(f"{at_s:5.0f} s  {text}"), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        """Print new windows and decisions."""
        for decision in scene.decisions[self._decisions_shown :]:
            self.say(decision_line(decision), at_s=scene.elapsed_s)
        self._decisions_shown = len(scene.decisions)
        if len(scene.windows) > self._windows_shown and scene.marks:
            self.say(window_line(scene), at_s=scene.elapsed_s)
        self._windows_shown = len(scene.windows)


Screen = LiveScreen | PlainScreen


@contextmanager
def open_screen(console: Console, *, plain: bool) -> Iterator[Screen]:
    """A live picture, if the console is a capable terminal and `plain` is off."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        yield PlainScreen(console)
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield LiveScreen(live)


def window_line(scene: Scene) -> str:
    """The latest window and the traffic during it, as one line."""
    window = scene.windows[-1]
    latency = scene.latency
    # A window that closed just before a shift may be shown just after it.
    begun = [mark for mark in scene.marks if mark.at_s < window.closed_unix_s] or scene.marks[:1]
    return (
        f"{begun[-1].domain:<10}  window {len(scene.windows):>2}  "
        f"rank max/mean {window.max_over_mean:.2f}  generation {window.generation}  "
        f"{scene.tokens_per_s:.0f} tokens/s  "
        f"inter-token p50 {latency.p50_ms:.0f} p99 {latency.p99_ms:.0f} ms  "
        f"{scene.tokens_identical:,} of {scene.tokens_compared:,} tokens identical  "
        f"{scene.failed_requests} failed"
    )


def decision_line(decision: status_pb2.Decision) -> str:
    """A decision with its reason, as one line."""
    moves = f", {decision.moves} moves" if decision.accepted else ""
    shift = ", traffic shift" if decision.shift_detected else ""
    verdict = "yes" if decision.accepted else "no"
    return f"decision {decision.sequence}: {verdict}{moves}{shift}: {decision.reason}"


def picture(scene: Scene) -> RenderableType:
    """The whole live view."""
    elapsed, gib = f"{scene.elapsed_s:.0f} s  ", scene.memory_bytes / 2**30
    headline = Text.assemble(
        (elapsed, "dim"), (scene.activity, "bold"), (f"  {gib:.1f} GiB", "dim")
    )
    parts: list[RenderableType] = [headline]
    if scene.references_ready < scene.references_total and not scene.marks:
        parts.append(
            Text(f"reference tokens: {scene.references_ready} of {scene.references_total} prompts")
        )
    if scene.status is not None:
        parts += [ranks_view(scene.status, tokens_per_s={}), _rollout(scene.status)]
    if scene.windows:
        parts.append(balance_chart(scene.windows, scene.marks))
    if scene.marks:
        parts.append(_traffic(scene))
    for decision in scene.decisions[-_NUM_DECISIONS:]:
        parts.append(Text(decision_line(decision), style="" if decision.accepted else "dim"))
    return Panel(Group(*parts), title="equipoise demo", border_style="dim")


def balance_chart(
    windows: Sequence[status_pb2.WindowStatus], marks: Sequence[Mark]
) -> RenderableType:
    """Rank max/mean per window as bars, higher is worse, with each domain's name at its start."""
    shown = windows[-_NUM_BARS:]
    bars = Text("rank max/mean  ")
    names, begun = "", 0
    for place, window in enumerate(shown, start=len(bars)):
        value = window.max_over_mean
        height = (value - 1) / (_HIGHEST_BAR - 1) * len(_BARS)
        bars.append(_BARS[max(0, min(int(height), len(_BARS) - 1))], style=_color(value))
        while begun < len(marks) and marks[begun].at_s < window.closed_unix_s:
            names = names.ljust(place)[:place] + f"└{marks[begun].domain}"
            begun += 1
    newest = shown[-1].max_over_mean
    bars.append(f"  {newest:.2f}", style=f"bold {_color(newest)}")
    return Group(bars, Text(names, style="dim"))


def _rollout(status: status_pb2.PoolStatus) -> RenderableType:
    """The rollout, or a placeholder so that the picture does not jump."""
    if not status.HasField("rollout"):
        return Text("no rollout", style="dim")
    rollout = status.rollout
    return Text(
        f"rollout of generation {rollout.generation}: {rollout.state}, {rollout.moves} moves",
        style="yellow",
    )


def _traffic(scene: Scene) -> RenderableType:
    latency = scene.latency
    identical = "green" if scene.tokens_identical == scene.tokens_compared else "bold red"
    return Text.assemble(
        f"{scene.tokens_per_s:.0f} tokens/s  inter-token p50 {latency.p50_ms:.0f} "
        f"p99 {latency.p99_ms:.0f} ms  {scene.requests:,} requests, ",
        (f"{scene.failed_requests} failed", "bold red" if scene.failed_requests else "green"),
        ", ",
        (f"{scene.tokens_identical:,} of {scene.tokens_compared:,} tokens identical", identical),
    )


def _color(max_over_mean: float) -> str:
    if max_over_mean <= RECOVERED_MAX_OVER_MEAN:
        return "green"
    return "yellow" if max_over_mean < DRIFTED_MAX_OVER_MEAN else "red"

"""Images of loads, replays and latencies. Needs matplotlib; imported only when one is drawn."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from equipoise.cli.offline.replay_run import ReplayRun
from equipoise.cli.overlap.analysis import NUM_BINS, Overlap
from equipoise.formats.errors import FormatError
from equipoise.planning.arrays import Load

# Okabe and Ito's palette, distinguishable with colour blindness; grey is for "never".
_GREY, _BLUE, *_OTHERS = (
    "#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
)  # fmt: skip
_MARKED_WINDOWS = 60
"""More markers than this blur into a line."""
_PERCENTILES = (50, 90, 99)
_LABEL_CHARS = 40


def draw_loads(times_mean: Load, path: Path, *, title: str, highest: float) -> None:
    """Draw a heat map of `times_mean`, [layers, ranks]: rank load over the layer's mean.

    Colours span 1 / `highest` to `highest`. The suffix of `path` chooses the image format.

    Raises:
        FormatError: the file cannot be written.
    """
    height = min(12.0, max(2.6, 1.4 + 0.16 * len(times_mean)))
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        times_mean.clip(min=1 / highest / 2),
        norm=LogNorm(1 / highest, highest, clip=True),
        cmap="RdBu_r",
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_title(title, loc="left")
    axes.set_xlabel("rank")
    axes.set_ylabel("MoE layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 10]))
    bar = figure.colorbar(image, ax=axes, label="rank load / layer mean")
    ticks = (1 / highest, 0.8, 1.0, 1.25, highest)
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.set_yticklabels([f"{tick:.2f}" for tick in ticks])
    _save(figure, path)


def draw_replay(runs: Sequence[ReplayRun], path: Path, *, window_s: float) -> None:
    """Draw balancedness and moves over windows, one line per policy.

    Raises:
        FormatError: the file cannot be written.
    """
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    balance, moves = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    numbers = range(1, len(runs[0].windows) + 1)
    colours = (_GREY, _BLUE, *_OTHERS)
    for index, run in enumerate(runs):
        colour = colours[index % len(colours)]
        switched = [i for i, window in enumerate(run.windows) if window.accepted]
        balance.plot(
            numbers,
            [math.nan if one.balancedness is None else one.balancedness for one in run.windows],
            color=colour,
            label=run.name,
            marker="o" if switched and len(run.windows) <= _MARKED_WINDOWS else None,
            markevery=switched,
        )
        total = list(accumulate(window.moves for window in run.windows))
        moves.step(numbers, total, color=colour, where="post")
    balance.set_ylabel("balancedness\n(mean / max rank load)")
    balance.set_ylim(top=1.01)
    balance.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    moves.set_ylabel("moves so far")
    moves.set_xlabel(f"window of {window_s:g} s (dot: a new layout follows)")
    moves.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (balance, moves):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def draw_latencies(latencies_s: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Draw the cumulative distribution of each kind of latency, by its label.

    Raises:
        FormatError: the file cannot be written.
    """
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panels = figure.subplots(1, len(latencies_s), sharey=True)
    for axes, (label, values_s) in zip(panels, latencies_s.items(), strict=True):
        values_ms = np.sort(values_s) * 1e3
        share = np.arange(1, len(values_ms) + 1) / max(1, len(values_ms)) * 100
        axes.step(values_ms, share, color=_BLUE, where="post")
        for percentile in _PERCENTILES if len(values_ms) else ():
            value = float(np.percentile(values_ms, percentile))
            axes.plot(value, percentile, "o", color=_BLUE, markersize=4)
            axes.annotate(
                f"p{percentile} {value:.0f}", (value, percentile), (5, -10),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
        axes.set_xlabel(f"{label}, ms")
        axes.set_xlim(left=0)
        axes.margins(x=0.2)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("percent of samples")
    _save(figure, path)


def draw_overlap(overlap: Overlap, path: Path, *, title: str) -> None:
    """Draw what ran over time, and the communication and computation of each layer or track.

    Raises:
        FormatError: the file cannot be written.
    """
    bars = [(f"layer {layer}", times) for layer, times in overlap.layers] or [
        (_label(f"{row.process} {row.track}"), row.times) for row in overlap.tracks
    ]
    height = min(20.0, 0.25 * len(bars))
    figure = Figure(figsize=(9, 4 + height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    over_time, below = figure.subplots(2, 1, height_ratios=(2.4, 1 + height))
    edges_ms = np.linspace(0, overlap.range_us / 1e3, NUM_BINS + 1)
    lower = np.zeros(NUM_BINS)
    labels = ("computation", "hidden communication", "exposed communication")
    colours = (_GREY, _BLUE, _OTHERS[0])
    for label, colour, share in zip(labels, colours, np.array(overlap.bins).T, strict=True):
        over_time.stairs(
            lower + share, edges_ms, baseline=lower, fill=True, color=colour, label=label
        )
        lower = lower + share
    over_time.set_ylim(0, 1)
    over_time.set_ylabel("fraction of time")
    over_time.set_xlabel("ms")
    over_time.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    rows = [(t.computation_us - t.hidden_us, t.hidden_us, t.exposed_us) for _, t in reversed(bars)]
    left, places = np.zeros(len(bars)), range(len(bars))
    for colour, values in zip(colours, np.array(rows).T / 1e3, strict=True):
        below.barh(places, values, left=left, color=colour)
        left = left + values
    below.set_yticks(places, [name for name, _ in reversed(bars)])
    below.set_xlabel("ms")
    over_time.set_xlim(0, edges_ms[-1])
    below.set_xlim(0, left.max() * 1.02)
    for axes in (over_time, below):
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _label(name: str) -> str:
    """The beginning and the end of a name, which leave room for what it labels."""
    half = _LABEL_CHARS // 2
    return name if len(name) <= _LABEL_CHARS else f"{name[:half]}…{name[-half:]}"


def _save(figure: Figure, path: Path) -> None:
    """Write the image; the same data gives the same bytes."""
    try:
        with rc_context({"svg.hashsalt": "equipoise", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None

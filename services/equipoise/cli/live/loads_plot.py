"""The picture of `equipoise loads --out`. Needs matplotlib."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from equipoise.cli.live.loads import HIGHEST, Heat
from equipoise.formats.errors import FormatError
from equipoise.planning.balance import balancedness

_TICKS = (1 / HIGHEST, 0.8, 1.0, 1.25, HIGHEST)


def draw(heat: Heat, path: Path) -> None:
    """Write the heat map; the suffix of `path` says which kind.

    Raises:
        FormatError: it cannot be written.
    """
    times = heat.times_mean
    height = min(12.0, max(2.6, 1.4 + 0.16 * len(times)))
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(
        times.clip(min=1 / HIGHEST / 2),
        norm=LogNorm(1 / HIGHEST, HIGHEST, clip=True),
        cmap="RdBu_r",
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_title(
        f"pool {heat.pool}, generation {heat.generation}: balancedness "
        f"{balancedness(heat.of_rank):.3f}",
        loc="left",
    )
    axes.set_xlabel("rank")
    axes.set_ylabel("MoE layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 10]))
    bar = figure.colorbar(picture, ax=axes, label="times the layer's mean")
    bar.ax.yaxis.set_major_locator(FixedLocator(_TICKS))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.set_yticklabels([f"{tick:.2f}" for tick in _TICKS])
    try:
        # The same loads give the same file.
        with rc_context({"svg.hashsalt": "equipoise", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None

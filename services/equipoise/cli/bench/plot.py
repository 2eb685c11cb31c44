"""The picture of a benchmark: what part of requests waited how long at most. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from equipoise.cli.bench.clients import Served
from equipoise.cli.bench.report import e2es_s, itls_s, ttfts_s
from equipoise.formats.errors import FormatError

_COLOUR = "#0072B2"
_MARKS = (50, 90, 99)


def draw(served: Sequence[Served], path: Path, *, title: str) -> None:
    """Write the picture; the suffix of `path` says which kind.

    Raises:
        FormatError: it cannot be written.
    """
    good = [one for one in served if not one.failure]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, words, values_s in zip(
        panels,
        ("to the first token (TTFT), ms", "between tokens (ITL), ms", "to the end (E2E), ms"),
        (ttfts_s(good), itls_s(good), e2es_s(good)),
        strict=True,
    ):
        values_ms = np.sort(values_s) * 1e3
        part = np.arange(1, len(values_ms) + 1) / max(1, len(values_ms)) * 100
        axes.step(values_ms, part, color=_COLOUR, where="post")
        if len(values_ms):
            for mark in _MARKS:
                value = float(np.percentile(values_ms, mark))
                axes.plot(value, mark, "o", color=_COLOUR, markersize=4)
                axes.annotate(
                    f"p{mark} {value:.0f}", (value, mark), (5, -10), textcoords="offset points",
                    fontsize=8,
                )  # fmt: skip
        axes.set_xlabel(words)
        axes.set_xlim(left=0)
        axes.margins(x=0.2)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("percent that took at most so long")
    try:
        with rc_context({"svg.hashsalt": "equipoise", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None

"""The picture of a replay: balance and moves over windows, a line a policy. Needs matplotlib."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from equipoise.cli.offline.replay_run import Run
from equipoise.formats.errors import FormatError

# Okabe and Ito's colours, which colour-blind people can tell apart; the first is for "never".
_COLOURS = ("#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKED_WINDOWS = 60  # more markers than this are a smear


def draw(runs: Sequence[Run], path: Path, *, window_s: float) -> None:
    """Write the picture; the suffix of `path` says which kind.

    Raises:
        FormatError: it cannot be written.
    """
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    balance, moves = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    numbers = range(1, len(runs[0].steps) + 1)
    for index, run in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)]
        switched = [i for i, step in enumerate(run.steps) if step.accepted]
        balance.plot(
            numbers,
            [step.balancedness for step in run.steps],
            color=colour,
            label=run.name,
            marker="o" if switched and len(run.steps) <= _MARKED_WINDOWS else None,
            markevery=switched,
        )
        total = list(accumulate(step.moves for step in run.steps))
        moves.step(numbers, total, color=colour, where="post")
    balance.set_ylabel("balancedness\n(mean / max rank load)")
    balance.set_ylim(top=1.01)
    balance.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    moves.set_ylabel("moves so far")
    moves.set_xlabel(f"window of {window_s:g} s; a dot: a new layout behind it")
    moves.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (balance, moves):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        # The same runs give the same file.
        with rc_context({"svg.hashsalt": "equipoise", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None

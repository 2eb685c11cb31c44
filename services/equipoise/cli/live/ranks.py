"""The ranks of a pool as a table, and what its cells show. Pure.

Text from messages is never interpreted as markup. Used by `equipoise status` and the demo.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from equipoise.cli.display import NO_DATA
from equipoise_api.v1 import status_pb2

GOOD_BALANCEDNESS = 0.9
FAIR_BALANCEDNESS = 0.8

_PARTS = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 10
_SHORTEST_NAME = 14
"""Columns that the names of workers keep, at the cost of those of nodes."""
_OTHER_WIDTH = 62
"""Columns of what is no name, at most."""


class Name:
    """A name on one line; one that is too long loses its middle, because both ends matter."""

    def __init__(self, name: str, *, state: Text | None = None) -> None:
        """`state` follows the name, whole."""
        self._name = name
        self._state = state or Text()

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        length, state = cell_len(self._name), self._state.cell_len
        return Measurement(1 + state, length + state).with_maximum(options.max_width)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        name, room = self._name, max(1, options.max_width - self._state.cell_len)
        if cell_len(name) > room:
            head = (room - 1) // 2
            name = f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"
        yield Text(name, no_wrap=True).append_text(self._state)


def worst_first(ranks: Iterable[status_pb2.RankStatus]) -> list[status_pb2.RankStatus]:
    """Ranks that are not connected, then those in trouble, then the busiest."""
    return sorted(
        ranks,
        key=lambda rank: (
            rank.state == "connected",
            not rank.trouble,
            0.0 if math.isnan(rank.load_share) else -rank.load_share,
            rank.rank,
        ),
    )


def ranks_view(
    status: status_pb2.PoolStatus,
    *,
    tokens_per_s: Mapping[int, float],
    room: int | None = None,
    width: int | None = None,
) -> RenderableType:
    """One row per rank: worker, node, share of the load, generation, throughput, step, requests.

    If the table has more lines than there is `room` for, it lists the worst ranks and counts the
    others. Where a `width` leaves too little for names, nodes are left out.
    """
    ranks = list(status.ranks)
    if room is None or len(ranks) + 1 <= room:
        return _table(ranks, tokens_per_s=tokens_per_s, num_ranks=len(ranks), width=width)
    ordered = worst_first(ranks)
    shown, others = ordered[: max(0, room - 2)], ordered[max(0, room - 2) :]
    loads = [rank.load_share for rank in others if not math.isnan(rank.load_share)]
    most = f", at most {max(loads) * len(ranks):.2f}x the mean load" if loads else ""
    rest = Text(f"and {len(others)} {'more ' if shown else ''}ranks{most}", style="dim")
    if not shown:
        return rest
    table = _table(shown, tokens_per_s=tokens_per_s, num_ranks=len(ranks), width=width)
    return Group(table, rest)


def _table(
    ranks: Sequence[status_pb2.RankStatus],
    *,
    tokens_per_s: Mapping[int, float],
    num_ranks: int,
    width: int | None,
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("rank", no_wrap=True)
    longest = max((cell_len(rank.worker) for rank in ranks), default=0)
    table.add_column("worker", min_width=min(longest, _SHORTEST_NAME))
    longest += max((cell_len(rank.node) for rank in ranks), default=0)
    shows_nodes = width is None or width >= _OTHER_WIDTH + min(longest, 2 * _SHORTEST_NAME)
    if shows_nodes:
        table.add_column("node")
    table.add_column("load", no_wrap=True)
    for name in ("generation", "tokens/s" if tokens_per_s else "tokens", "step", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    shares_places = any(rank.num_places for rank in ranks)
    if shares_places:
        table.add_column("places", justify="right", no_wrap=True)
    for rank in ranks:
        state = Text(" idle" if rank.idle else "", style="dim")
        if rank.state != "connected":
            state = Text(f" {rank.state}", style="red")
        rate = tokens_per_s.get(rank.rank, 0.0)
        tokens = f"{rate:,.0f}" if tokens_per_s else f"{rank.tokens_processed:,}"
        queued = f"+{rank.queued_requests}" * bool(rank.queued_requests)
        requests = f"{rank.active_requests}{queued}"
        if rank.engine:  # Plugins see neither.
            tokens = requests = "-"
        table.add_row(
            str(rank.rank),
            Name(rank.worker, state=state),
            *([Name(rank.node)] if shows_nodes else []),
            load_bar(rank.load_share, num_ranks=num_ranks),
            _generation_text(rank),
            tokens,
            format_duration(rank.median_step_us),
            requests,
            *([f"{rank.used_places}/{rank.num_places}"] if shares_places else []),
        )
    return table


def load_bar(share: float, *, num_ranks: int) -> Text:
    """A rank's load relative to the mean, as a bar that ends at twice the mean and as a number."""
    if math.isnan(share):
        return Text(NO_DATA, style="dim")
    times_mean = share * num_ranks
    eighths = round(min(times_mean / 2, 1.0) * _BAR_WIDTH * 8)
    bar = "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")
    style = balance_style(1 / times_mean) if times_mean > 1 else "green"
    return Text.assemble((bar.ljust(_BAR_WIDTH), style), f" {times_mean:.2f}x")


def balance_style(balancedness: float) -> str:
    """Green, yellow or red, by balancedness."""
    if balancedness >= GOOD_BALANCEDNESS:
        return "green"
    return "yellow" if balancedness >= FAIR_BALANCEDNESS else "red"


def format_duration(duration_us: int) -> str:
    """A duration such as "12.1 ms"; "-" for zero."""
    if not duration_us:
        return "-"
    return f"{duration_us / 1e3:.1f} ms" if duration_us < 1e6 else f"{duration_us / 1e6:.1f} s"


class RateMeter:
    """Tokens per second of each rank, from the counters of two statuses."""

    def __init__(self) -> None:
        self._seen: tuple[float, dict[int, int]] | None = None
        self._rates: dict[int, float] = {}

    def update(self, status: status_pb2.PoolStatus, *, now: float) -> dict[int, float]:
        """Rates by rank between this status and an earlier one, at least a second apart.

        A rank whose counter decreased has restarted, and has no rate until the next status.
        """
        tokens = {rank.rank: rank.tokens_processed for rank in status.ranks}
        if self._seen is None:
            self._seen = (now, tokens)
        seen_s, earlier = self._seen
        if now - seen_s >= 1.0:
            self._rates = {
                rank: (count - earlier[rank]) / (now - seen_s)
                for rank, count in tokens.items()
                if count >= earlier.get(rank, count + 1)
            }
            self._seen = (now, tokens)
        return dict(self._rates)


def _generation_text(rank: status_pb2.RankStatus) -> str:
    """The running generation and, if any, the staged one: "7→8"."""
    return f"{rank.generation}" + f"→{rank.staged_generation}" * bool(rank.staged_generation)

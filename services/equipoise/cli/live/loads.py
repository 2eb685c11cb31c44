"""`equipoise loads`: rank load as a heat map, and the busiest experts."""

import math
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from equipoise.cli.display import NO_DATA, console, print_json
from equipoise.cli.live.balance import balance_text, shared_expert
from equipoise.cli.live.client import BalancerRejectedError, connected
from equipoise.cli.live.settings import LoadsSettings
from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, balancedness_per_layer
from equipoise.planning.topology import expert_name

HIGHEST = 1.6
"""Rank load over the mean at which the colour scale ends; it begins at the reciprocal."""

_LOW, _MIDDLE, _HIGH = (44, 111, 187), (105, 105, 105), (222, 90, 30)
_BARS = " ▁▂▃▄▅▆▇█"
_MARGIN = 24
_ROOM_FOR_NUMBER = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heat:
    """The load of a pool's latest window, in assignments."""

    pool: str
    """Name of the pool."""

    generation: int
    """Generation of the layout that served the window."""

    rank_load: Load
    """[layers, ranks]."""

    expert_load: Load
    """[layers, experts]."""

    shared_expert: int | None
    """Number of the shared expert; None if it is not in slots."""

    @property
    def balancedness(self) -> float:
        """Mean over layers of mean / max rank load; not a number without load."""
        return balancedness(self.rank_load) if self.rank_load.any() else math.nan

    @property
    def times_mean(self) -> Load:
        """Rank load over the mean of its layer, [layers, ranks]; not a number without load."""
        mean = self.rank_load.mean(axis=1, keepdims=True)
        times: Load = np.divide(
            self.rank_load, mean, out=np.full_like(self.rank_load, math.nan), where=mean > 0
        )
        return times


def run(settings: LoadsSettings) -> int:
    """Print or draw the latest window's load.

    Raises:
        BalancerRejectedError: the balancer is unreachable or the pool has no window yet.
        FormatError: the image cannot be written.
    """
    with connected(settings) as client:
        status = client.status()
        loads = client.loads()
    layers, ranks, experts = loads.num_layers, loads.num_ranks, loads.num_experts
    heat = Heat(
        pool=status.pool,
        generation=loads.window_generation,
        rank_load=load_table(loads.window_rank_assignments, (layers, ranks)),
        expert_load=load_table(loads.window_assignments, (layers, experts)),
        shared_expert=shared_expert(status.model),
    )
    if settings.out is not None:
        from equipoise.cli.plots import draw_loads

        title = (
            f"pool {heat.pool}, generation {heat.generation}: balancedness "
            f"{balance_text(heat.balancedness)}"
        )
        draw_loads(heat.times_mean, settings.out, title=title, highest=HIGHEST)
    if settings.json:
        document = {
            "pool": heat.pool,
            "generation": heat.generation,
            "balancedness": heat.balancedness if heat.rank_load.any() else None,
            "balancedness_of_layer": [
                balancedness(layer[None]) if layer.any() else None for layer in heat.rank_load
            ],
            "rank_load": heat.rank_load.tolist(),
            "expert_load": heat.expert_load.tolist(),
            "shared_expert": heat.shared_expert,
        }
        print_json(document)
    elif settings.out is not None:
        print(f"wrote {settings.out}")
    else:
        out = console()
        has_color = out.color_system is not None and not out.no_color
        out.print(heat_view(heat, width=out.width, top=settings.top, has_color=has_color))
    return 0


def heat_view(heat: Heat, *, width: int, top: int, has_color: bool) -> RenderableType:
    """One row per layer, one cell per rank; a cell without room for a number has a colour or a bar.

    If there are more ranks than columns, neighbours share a cell, which shows the busiest.
    """
    times = heat.times_mean
    num_layers, num_ranks = times.shape
    room = max(1, width - _MARGIN)
    per_cell = -(-num_ranks // room)
    cells = np.maximum.reduceat(times, np.arange(0, num_ranks, per_cell), axis=1)
    cell_width = min(_ROOM_FOR_NUMBER + 1, max(1, room // cells.shape[1]))
    per_layer = balancedness_per_layer(heat.rank_load)
    rows: list[RenderableType] = [
        Text.assemble(
            ("pool ", "dim"), (heat.pool, "bold"),
            (f"  generation {heat.generation}  balancedness ", "dim"),
            balance_text(heat.balancedness),
        ),
        Text(f"layer  balance  ranks 0 to {num_ranks - 1}, load / mean", style="dim"),
    ]  # fmt: skip
    for layer in range(num_layers):
        if math.isnan(times[layer, 0]):
            rows.append(Text.assemble((f"{layer:>5}  {NO_DATA}", "dim")))
            continue
        row = Text.assemble((f"{layer:>5}  ", "dim"), f"{per_layer[layer]:>7.3f}  ")
        for value in cells[layer]:
            if cell_width >= _ROOM_FOR_NUMBER:
                cell = f"{value:.2f}".center(cell_width)
            else:
                cell = (" " if has_color else _bar(value)) * cell_width
            row.append(cell, style=f"white on rgb({','.join(map(str, _color(value)))})")
        rows.append(row)
    rows.append(_legend(per_cell, has_color=has_color))
    if top and heat.expert_load.any():
        rows += [Text(), *_busiest(heat, top)]
    return Group(*rows)


def load_table(cells: bytes, shape: tuple[int, int]) -> Load:
    """Decode a table of float64 in a balancer's answer.

    Raises:
        BalancerRejectedError: the pool has no window yet, or the sizes disagree.
    """
    if not cells:
        raise BalancerRejectedError("the pool has closed no window yet: retry in a moment")
    if len(cells) != 8 * shape[0] * shape[1]:
        raise BalancerRejectedError(
            "the balancer sent loads of an unexpected shape: install its version of equipoise here"
        )
    table: Load = np.frombuffer(cells, dtype="<f8").reshape(shape).astype(np.float64)
    return table


def _position(times_mean: float) -> float:
    """Place on the scale, logarithmic: -1 for the lowest, 0 for the mean, 1 for the highest."""
    position = np.log(times_mean) / np.log(HIGHEST) if times_mean > 0 else -1.0
    return float(np.clip(position, -1.0, 1.0))


def _bar(times_mean: float) -> str:
    """A bar as high as the place on the scale, for terminals and files without colour."""
    return _BARS[round((_position(times_mean) + 1) / 2 * (len(_BARS) - 1))]


def _color(times_mean: float) -> tuple[int, int, int]:
    """Blue below the mean, grey at it, orange above."""
    position = _position(times_mean)
    end = _LOW if position < 0 else _HIGH
    red, green, blue = (
        round(middle + (value - middle) * abs(position))
        for middle, value in zip(_MIDDLE, end, strict=True)
    )
    return red, green, blue


def _legend(per_cell: int, *, has_color: bool) -> Text:
    text = Text("       below the mean ", style="dim")
    for power in np.linspace(-1, 1, 9):
        mark = "  " if has_color else _bar(HIGHEST**power)
        text.append(mark, style=f"on rgb({','.join(map(str, _color(HIGHEST**power)))})")
    text.append(f" above ({1 / HIGHEST:.2f}x to {HIGHEST:.2f}x)")
    if per_cell > 1:
        text.append(f"; each cell shows the busiest of {per_cell} ranks")
    return text


def _busiest(heat: Heat, top: int) -> list[Text]:
    lines = [Text("busiest experts and their share of the layer's load", style="dim")]
    for layer, row in enumerate(heat.expert_load):
        total = row.sum()
        if total <= 0:
            continue
        chosen = np.argsort(-row, kind="stable")[:top]
        names = [expert_name(int(one), shared=heat.shared_expert) for one in chosen]
        shares = "   ".join(
            f"{name:>4} {row[expert] / total:5.1%}"
            for name, expert in zip(names, chosen, strict=True)
        )
        lines.append(Text.assemble((f"{layer:>5}  ", "dim"), shares))
    return lines

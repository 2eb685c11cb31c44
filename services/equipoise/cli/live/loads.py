"""`equipoise loads`: how load fell on layers and ranks, as a heat map, and the busiest experts."""

import importlib
import json
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from equipoise.cli.display import console
from equipoise.cli.live.access import BalancerRefusedError
from equipoise.cli.live.client import asking
from equipoise.cli.live.settings import LoadsSettings
from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, balancedness_per_layer
from equipoise_api.v1 import status_pb2 as pb

HIGHEST = 1.6
"""Times the mean at which colours end, and one over it at the other end."""

_LOW, _MIDDLE, _HIGH = (44, 111, 187), (105, 105, 105), (222, 90, 30)
_MARGIN = 24
_ROOM_FOR_NUMBER = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heat:
    """The latest window: `of_rank` is [layers, ranks], `of_expert` [layers, experts]."""

    pool: str
    generation: int
    of_rank: Load
    of_expert: Load

    @property
    def times_mean(self) -> Load:
        """[layers, ranks]: load over the mean of its layer; 0 where there was none."""
        mean = self.of_rank.mean(axis=1, keepdims=True)
        times: Load = np.divide(self.of_rank, mean, out=np.zeros_like(self.of_rank), where=mean > 0)
        return times


def run(settings: LoadsSettings) -> int:
    """Show or write the latest window's load.

    Raises:
        BalancerRefusedError: the balancer cannot be asked, or has no window yet.
        FormatError: the picture cannot be written.
    """
    with asking(settings) as client:
        pool = settings.pool or client.status().pool
        heat = _heat(pool, client.loads())
    if settings.out is not None:
        importlib.import_module("equipoise.cli.live.loads_plot").draw(heat, settings.out)
    if settings.json:
        print(json.dumps(_document(heat), indent=2))
    elif settings.out is not None:
        print(f"written to {settings.out}")
    else:
        out = console()
        out.print(heat_view(heat, width=out.width, top=settings.top))
    return 0


def heat_view(heat: Heat, *, width: int, top: int) -> RenderableType:
    """A row a layer, a cell a rank; of many ranks neighbours share one, and the busiest shows."""
    times = heat.times_mean
    num_layers, num_ranks = times.shape
    room = max(1, width - _MARGIN)
    per_cell = -(-num_ranks // room)
    cells = np.maximum.reduceat(times, np.arange(0, num_ranks, per_cell), axis=1)
    cell_width = min(_ROOM_FOR_NUMBER + 1, max(1, room // cells.shape[1]))
    per_layer = balancedness_per_layer(heat.of_rank)
    rows: list[RenderableType] = [
        Text.assemble(
            ("pool ", "dim"), (heat.pool, "bold"),
            (f"  generation {heat.generation}  balancedness ", "dim"),
            (f"{balancedness(heat.of_rank):.3f}", "bold"),
        ),
        Text(f"layer  balance  ranks 0 to {num_ranks - 1}, times the mean", style="dim"),
    ]  # fmt: skip
    for layer in range(num_layers):
        row = Text.assemble((f"{layer:>5}  ", "dim"), f"{per_layer[layer]:>7.3f}  ")
        for value in cells[layer]:
            fits = cell_width >= _ROOM_FOR_NUMBER
            words = f"{value:.2f}".center(cell_width) if fits else " " * cell_width
            row.append(words, style=f"white on rgb({','.join(map(str, _color(value)))})")
        rows.append(row)
    rows.append(_legend(per_cell))
    if top:
        rows += [Text(), *_busiest(heat, top)]
    return Group(*rows)


def _heat(pool: str, loads: pb.GetLoadsResponse) -> Heat:
    of_rank = _table(loads.window_rank_assignments, (loads.num_layers, loads.num_ranks))
    of_expert = _table(loads.window_assignments, (loads.num_layers, loads.num_experts))
    return Heat(pool=pool, generation=loads.window_generation, of_rank=of_rank, of_expert=of_expert)


def _table(cells: bytes, shape: tuple[int, int]) -> Load:
    if not cells:
        raise BalancerRefusedError("the pool has closed no window yet: ask again in a moment")
    if len(cells) != 8 * shape[0] * shape[1]:
        raise BalancerRefusedError(
            "the balancer sent loads of another shape than it says: is it of another version?"
        )
    table: Load = np.frombuffer(cells, dtype="<f8").reshape(shape).astype(np.float64)
    return table


def _color(times_mean: float) -> tuple[int, int, int]:
    """Blue below the mean, grey at it, orange above, by its logarithm."""
    part = np.log(times_mean) / np.log(HIGHEST) if times_mean > 0 else -1.0
    part = float(np.clip(part, -1.0, 1.0))
    end = _LOW if part < 0 else _HIGH
    red, green, blue = (
        round(middle + (value - middle) * abs(part))
        for middle, value in zip(_MIDDLE, end, strict=True)
    )
    return red, green, blue


def _legend(per_cell: int) -> Text:
    text = Text("       less than the mean ", style="dim")
    for power in np.linspace(-1, 1, 9):
        text.append("  ", style=f"on rgb({','.join(map(str, _color(HIGHEST**power)))})")
    text.append(f" more ({1 / HIGHEST:.2f} to {HIGHEST:.2f} times)")
    if per_cell > 1:
        text.append(f"; a cell is {per_cell} ranks, the busiest shows")
    return text


def _busiest(heat: Heat, top: int) -> list[Text]:
    lines = [Text("busiest experts, and their share of the layer's assignments", style="dim")]
    for layer, row in enumerate(heat.of_expert):
        total = row.sum()
        if total <= 0:
            continue
        chosen = np.argsort(-row, kind="stable")[:top]
        words = "   ".join(f"{expert:>4} {row[expert] / total:5.1%}" for expert in chosen)
        lines.append(Text.assemble((f"{layer:>5}  ", "dim"), words))
    return lines


def _document(heat: Heat) -> dict[str, object]:
    return {
        "pool": heat.pool,
        "generation": heat.generation,
        "balancedness": balancedness(heat.of_rank),
        "balancedness_of_layer": balancedness_per_layer(heat.of_rank).tolist(),
        "rank_load": heat.of_rank.tolist(),
        "expert_load": heat.of_expert.tolist(),
    }

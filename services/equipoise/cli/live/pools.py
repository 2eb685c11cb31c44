"""Several pools in one table. Pure."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from equipoise.cli.live.balance import balance_text
from equipoise.cli.live.handovers import handovers_text
from equipoise.cli.live.view import health_name, health_style
from equipoise_api.v1 import status_pb2


def pools_view(pools: Sequence[status_pb2.PoolSummary]) -> RenderableType:
    """Several pools, one row each, their handovers, and which of them cannot exchange latents."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("pool", "phase", "health", "ranks", "advised", "generation", "balancedness"):
        table.add_column(name, justify="left" if name in {"pool", "phase", "health"} else "right")
    for pool in pools:
        table.add_row(
            Text(pool.pool, style="bold"),
            pool.phase or "-",
            Text(health_name(pool.health), style=health_style(pool.health)),
            f"{pool.ranks_serving}/{pool.num_ranks}",
            str(pool.advised_ranks or "-"),
            str(pool.generation),
            balance_text(pool.balancedness, digits=2),
        )
    handovers = {pool.pool: handovers_text(pool.handovers) for pool in pools}
    troubles = [pool.unreadable for pool in pools if pool.unreadable] + unpaired_prefill(pools)
    return Group(
        table,
        *(Text(f"{pool}: {text}") for pool, text in handovers.items() if text),
        *(Text(line, style="yellow") for line in troubles),
    )


def unpaired_prefill(pools: Sequence[status_pb2.PoolSummary]) -> list[str]:
    """The prefill pools whose latents no decode pool can use, each with both forms."""
    decode = [pool for pool in pools if pool.phase == "decode"]
    return [
        f"prefill pool {pool.pool} hands over to no decode pool: its latents are "
        f"{_forms_text(pool)}, those of "
        + ", ".join(f"{one.pool} are {_forms_text(one)}" for one in decode)
        for pool in pools
        if pool.phase == "prefill"
        and decode
        and not any(set(pool.latent_forms) & set(one.latent_forms) for one in decode)
    ]


def _forms_text(pool: status_pb2.PoolSummary) -> str:
    return " and ".join(pool.latent_forms) or "unknown"

"""`equipoise status`: the state of a pool, once or until Ctrl-C. `view` draws it."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from equipoise.cli.display import print_fault, print_json, print_view
from equipoise.cli.live.client import (
    BalancerClient,
    BalancerRejectedError,
    connected,
    watch_leader,
)
from equipoise.cli.live.pools import pools_view
from equipoise.cli.live.ranks import RateMeter
from equipoise.cli.live.settings import StatusSettings
from equipoise.cli.live.view import NUM_DECISIONS, pool_view, status_line
from equipoise.wire.plain import as_json
from equipoise_api.v1 import status_pb2

_STALE_AFTER_S = 3.0

EXIT_NOT_ALL_SERVE = 3


def run(settings: StatusSettings) -> int:
    """Show the pool; return 0 if every intended rank serves, else 3.

    Raises:
        BalancerRejectedError: the balancer is unreachable or does not know the pool.
    """
    console = Console(highlight=False)
    with connected(settings) as client:
        if settings.watch:
            return _watch(client, settings, console)
        named = [status_pb2.PoolSummary(pool=settings.pool)] if settings.pool else []
        known = status_pb2.ListPoolsResponse(pools=named) if named else client.pools()
        pools = known.pools
        if settings.json:
            found = [_status(client, pool) for pool in pools]
            print_json(_document(found))
            return _exit_status([status.health for status in found])
        if len(pools) != 1:
            return _show_pools(client, known)
        status = client.status(pools[0].pool)
        decisions, fault = _latest_decisions(client)
    print_view(pool_view(status, decisions=decisions, framed=console.is_terminal))
    if fault:
        print_view(Text(f"earlier decisions cannot be read: {fault}", style="yellow"))
    return _exit_status([status.health])


def _status(client: BalancerClient, pool: status_pb2.PoolSummary) -> status_pb2.PoolStatus:
    """The status of a pool; one that is unreadable must not hide the others."""
    if pool.unreadable:
        return status_pb2.PoolStatus(
            pool=pool.pool, health=pool.health, health_reason=pool.unreadable
        )
    return client.status(pool.pool)


def _latest_decisions(client: BalancerClient) -> tuple[Sequence[status_pb2.Decision], str]:
    """The latest decisions, and why there are none: they are in the store, the status is not."""
    try:
        return client.decisions(limit=NUM_DECISIONS), ""
    except BalancerRejectedError as error:
        return (), str(error)


class Picture:
    """The latest status on a terminal, with its age once it is stale."""

    def __init__(self, decisions: Sequence[status_pb2.Decision] = ()) -> None:
        self.fault = ""
        self._decisions = {one.sequence: one for one in decisions}
        self._meter = RateMeter()
        self._view: RenderableType = Text("waiting for the first status", style="dim")
        self._taken_s = time.monotonic()

    def take(self, status: status_pb2.PoolStatus) -> None:
        """Show this status."""
        self.fault = ""
        self._taken_s = time.monotonic()
        if status.HasField("last_decision"):
            self._decisions[status.last_decision.sequence] = status.last_decision
        self._view = pool_view(
            status,
            tokens_per_s=self._meter.update(status, now=self._taken_s),
            decisions=[one for _, one in sorted(self._decisions.items(), reverse=True)],
            fits=True,
        )

    def fail(self, fault: str) -> None:
        """Show why there is no newer status."""
        self.fault = fault

    def renderable(self) -> RenderableType:
        """The current picture."""
        age_s = time.monotonic() - self._taken_s
        if not self.fault and age_s < _STALE_AFTER_S:
            return self._view
        note = f"updated {age_s:.0f} s ago" + (f": {self.fault}" if self.fault else "")
        return Group(self._view, Text(note, style="yellow" if self.fault else "dim"))


def _show_pools(client: BalancerClient, known: status_pb2.ListPoolsResponse) -> int:
    if known.pools:
        print_view(pools_view(known.pools))
    else:
        why = (
            f"it is not ready: {known.not_ready}" if known.not_ready else "no worker has connected"
        )
        print(f"the balancer at {client.address} has no pool yet: {why}")
    return _exit_status([pool.health for pool in known.pools])


def _watch(client: BalancerClient, settings: StatusSettings, console: Console) -> NoReturn:
    """Show every change until Ctrl-C, whichever balancer leads."""
    client.status()  # Fail at once if the balancer is unreachable or does not know the pool.
    if settings.json or not console.is_terminal:
        show = _printer(settings)
        watch_leader(settings, lambda _, status: show(status), report=print_fault)
    decisions, _ = _latest_decisions(client)
    picture = Picture(decisions)
    with Live(get_renderable=picture.renderable, console=console, refresh_per_second=2):
        watch_leader(settings, lambda _, status: picture.take(status), report=picture.fail)


def _printer(settings: StatusSettings) -> Callable[[status_pb2.PoolStatus], None]:
    """A function that prints a line for each status whose line differs from the last one."""
    before = ""

    def show(status: status_pb2.PoolStatus) -> None:
        nonlocal before
        line = json.dumps(_document([status])) if settings.json else status_line(status)
        if line != before:
            print(line, flush=True)
        before = line

    return show


def _document(pools: Iterable[status_pb2.PoolStatus]) -> dict[str, Any]:
    """The JSON object of these pools, the same whether they are watched or not."""
    return {"pools": [as_json(pool) for pool in pools]}


def _exit_status(healths: list[status_pb2.PoolHealth.ValueType]) -> int:
    serve = healths and all(health == status_pb2.POOL_HEALTH_SERVING for health in healths)
    return 0 if serve else EXIT_NOT_ALL_SERVE

"""`equipoise status`: a pool as its balancer knows it, once or for as long as one likes to look.

Only asks; what it looks like is `view`'s.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import NoReturn

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from equipoise.cli.access import LEADER_METADATA, BalancerRefusedError, explained
from equipoise.cli.status_settings import StatusSettings
from equipoise.cli.view import RateMeter, pool_view, pools_view, status_line
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.wire.limits import MAX_STATUS_BYTES
from equipoise.wire.plain import as_json
from equipoise_api.v1 import status_pb2, status_pb2_grpc

_LIMIT = (("grpc.max_receive_message_length", MAX_STATUS_BYTES),)
_RETRY_S = 1.0
_STALE_AFTER_S = 3.0


class ExitStatus(IntEnum):
    """What a script learns without reading (1 is a fault, 2 a wrong option)."""

    ALL_SERVE = 0
    NOT_ALL_SERVE = 3


def run(settings: StatusSettings) -> int:
    """Show the pool; see `ExitStatus`.

    Raises:
        BalancerRefusedError: the balancer cannot be asked, or does not know the pool.
    """
    console = Console(highlight=False)
    credentials = settings.access.credentials()
    settings = _at_the_leader(settings, credentials)
    with credentials.blocking_channel(settings.address, options=_LIMIT) as channel:
        client = _Client(channel, settings, credentials)
        if settings.watch:
            return _watch(client, settings, console)
        if not settings.pool:
            pools = client.pools()
            if len(pools) != 1:
                return _show_pools(pools, settings, console)
        status = client.status()
    if settings.json:
        print(json.dumps(as_json(status), indent=2))
    else:
        console.print(pool_view(status))
    return _exit_status([status.health])


def _at_the_leader(settings: StatusSettings, credentials: Credentials) -> StatusSettings:
    """The address of the balancer that leads, where the one given follows and names it.

    A follower knows the past only. Where its leader cannot be reached from here, and where nobody
    answers, the given one has the word.
    """
    try:
        with credentials.blocking_channel(settings.address) as channel:
            _, call = status_pb2_grpc.StatusStub(channel).ListPools.with_call(
                status_pb2.ListPoolsRequest(),
                timeout=settings.timeout_s,
                metadata=credentials.metadata(),
            )
        leader = str(dict(call.trailing_metadata()).get(LEADER_METADATA, settings.address))
        with credentials.blocking_channel(leader) as channel:
            grpc.channel_ready_future(channel).result(timeout=settings.timeout_s)
    except (grpc.RpcError, grpc.FutureTimeoutError, TrustError):
        return settings
    return replace(settings, address=leader)


class _Client:
    """Asks one balancer; what gRPC raises becomes one sentence."""

    def __init__(
        self, channel: grpc.Channel, settings: StatusSettings, credentials: Credentials
    ) -> None:
        self._stub = status_pb2_grpc.StatusStub(channel)
        self._settings = settings
        self._credentials = credentials

    def pools(self) -> list[status_pb2.PoolSummary]:
        """Every pool in a line."""
        with explained(self._settings.address, self._credentials):
            response = self._stub.ListPools(
                status_pb2.ListPoolsRequest(),
                timeout=self._settings.timeout_s,
                metadata=self._credentials.metadata(),
            )
        return list(response.pools)

    def status(self) -> status_pb2.PoolStatus:
        """The pool that was asked for."""
        with explained(self._settings.address, self._credentials):
            response = self._stub.GetStatus(
                status_pb2.GetStatusRequest(pool=self._settings.pool),
                timeout=self._settings.timeout_s,
                metadata=self._credentials.metadata(),
            )
        return response.status

    def watch(self, take: Callable[[status_pb2.PoolStatus], None]) -> str:
        """Hand every new status to `take` until the stream ends; returns why it did."""
        request = status_pb2.WatchStatusRequest(pool=self._settings.pool)
        try:
            with explained(self._settings.address, self._credentials):
                for response in self._stub.WatchStatus(
                    request, metadata=self._credentials.metadata()
                ):
                    take(response.status)
        except BalancerRefusedError as error:
            return str(error)
        return f"the balancer at {self._settings.address} ended the stream"


class Picture:
    """The newest status on a terminal, honest about its age."""

    def __init__(self) -> None:
        self.fault = ""
        self._meter = RateMeter()
        self._view: RenderableType = Text("waiting for the first status", style="dim")
        self._taken_s = time.monotonic()

    def take(self, status: status_pb2.PoolStatus) -> None:
        """Show this status from now on."""
        self.fault = ""
        self._taken_s = time.monotonic()
        self._view = pool_view(status, tokens_per_s=self._meter.update(status, now=self._taken_s))

    def renderable(self) -> RenderableType:
        """What to draw now."""
        age_s = time.monotonic() - self._taken_s
        if not self.fault and age_s < _STALE_AFTER_S:
            return self._view
        note = f"as of {age_s:.0f} s ago" + (f": {self.fault}" if self.fault else "")
        return Group(self._view, Text(note, style="yellow" if self.fault else "dim"))


def _show_pools(
    pools: list[status_pb2.PoolSummary], settings: StatusSettings, console: Console
) -> int:
    if settings.json:
        print(json.dumps({"pools": [as_json(pool) for pool in pools]}, indent=2))
    elif pools:
        console.print(pools_view(pools))
    else:
        print(f"the balancer at {settings.address} knows no pool yet: no worker has said hello")
    return _exit_status([pool.health for pool in pools])


def _watch(client: _Client, settings: StatusSettings, console: Console) -> NoReturn:
    """Show what changes until Ctrl-C, also over restarts of the balancer."""
    client.status()  # a balancer that is not there, or does not know the pool, is told at once
    if settings.json or not console.is_terminal:
        while True:
            print(client.watch(_printer(settings)), file=sys.stderr, flush=True)
            time.sleep(_RETRY_S)
    picture = Picture()
    with Live(get_renderable=picture.renderable, console=console, refresh_per_second=2):
        while True:
            picture.fault = client.watch(picture.take)
            time.sleep(_RETRY_S)


def _printer(settings: StatusSettings) -> Callable[[status_pb2.PoolStatus], None]:
    """Prints a line for each status that reads differently from the one before."""
    before = ""

    def show(status: status_pb2.PoolStatus) -> None:
        nonlocal before
        line = json.dumps(as_json(status)) if settings.json else status_line(status)
        if line != before:
            print(line, flush=True)
        before = line

    return show


def _exit_status(healths: list[status_pb2.PoolHealth.ValueType]) -> ExitStatus:
    serve = healths and all(health == status_pb2.POOL_HEALTH_SERVING for health in healths)
    return ExitStatus.ALL_SERVE if serve else ExitStatus.NOT_ALL_SERVE

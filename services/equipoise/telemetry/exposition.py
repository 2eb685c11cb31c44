"""Metrics over HTTP: `/metrics` and whatever else a process serves on that port.

The server runs on the event loop, not on a thread, because collectors read state that the loop
changes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from importlib.metadata import version
from typing import Any

import uvicorn
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    make_asgi_app,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.http import HttpServer, Tls, address_of, bounded_http, open_listener
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.telemetry.scrape_token import ScrapeToken

_STOP_GRACE_S = 1
"""Seconds that open responses have to finish when the server stops."""

HEADER_S = 10.0
"""Seconds that a client has to send a request's header."""

MAX_CONNECTIONS = 64
"""Connections of one port: a few scrapers and probes."""

SEND_S = 30.0
"""Seconds that a client has to take a response of `/metrics`."""

_SHARE_OF_LOOP = 0.2
"""Largest share of the event loop's time that goes to `/metrics`."""

_log = logging.getLogger(__name__)


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """A registry with `collectors`, the version, and the usual process, platform and GC metrics."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_BuildInfo())
    for collector in collectors:
        registry.register(collector)
    return registry


class _BuildInfo(Collector):
    """The version of this process."""

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "equipoise_build_info", "1 for the version of this process.", labels=("version",)
        )
        info.add_metric([version("equipoise")], 1.0)
        yield info


def metrics_route(registry: CollectorRegistry, *, token_file: str = "") -> Route:
    """`GET /metrics`, in the format that the client accepts.

    Scrapes take turns, and together at most a share of the event loop's time, because whoever
    reaches the port may send as many as they like.

    With a `token_file`, requests without its bearer token get 401.

    Raises:
        TelemetryError: the token file cannot be used.
    """
    exposition = make_asgi_app(registry)
    token = ScrapeToken(token_file) if token_file else None

    turn = asyncio.Lock()

    async def bounded(scope: Scope, _receive: Receive, send: Send) -> None:
        written: list[Message] = []

        async def keep(message: Message) -> None:
            written.append(message)

        async with turn:
            began_s = time.thread_time()
            await exposition(scope, _no_body, keep)
            await asyncio.sleep((time.thread_time() - began_s) * (1 / _SHARE_OF_LOOP - 1))
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_S):
                for message in written:
                    await send(message)

    async def metrics(request: Request) -> Any:
        if token is not None and not token.accepts(request.headers.get("authorization", "")):
            return PlainTextResponse(
                "this port requires the bearer token of --metrics-token-file\n",
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return bounded

    return Route("/metrics", metrics)


async def _no_body() -> Message:
    return {"type": "http.request"}


@asynccontextmanager
async def serving_http(
    routes: Sequence[BaseRoute],
    *,
    listen: str,
    what: str = "metrics",
    path: str = "/metrics",
    max_connections: int = MAX_CONNECTIONS,
    tls: Tls | None = None,
) -> AsyncIterator[str]:
    """Serve `routes` on `listen` inside the block; yields host:port. Port 0 takes a free port.

    `what` names the server in the log and in errors, and its option, `--WHAT-listen`. `path` is the
    path to log. Beyond `max_connections`, the oldest connection without a request is closed, or if
    all have one, the oldest. With `tls` the port uses TLS.

    Raises:
        TelemetryError: the address cannot be listened on.
    """
    try:
        listener = open_listener(listen)
    except (OSError, ValueError) as error:
        raise TelemetryError(
            f"cannot serve {what} on {listen}: {error}; choose another address with --{what}-listen"
        ) from error
    protocol = bounded_http(header_s=HEADER_S, max_connections=max_connections, tls=tls)
    server = HttpServer(
        uvicorn.Config(
            Starlette(routes=routes),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_STOP_GRACE_S,
        )
    )
    address = address_of(listener, listen=listen)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        _log.info("%s at %s://%s%s", what, "https" if tls else "http", address, path)
        yield address
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        for connection in tuple(protocol.opened):
            connection.transport.abort()


def metrics_at(
    port: MetricsPort, *collectors: Collector, tls: Tls | None = None
) -> AbstractAsyncContextManager[str]:
    """Serve `/metrics` of `collectors` at `port`; nothing if it is disabled.

    `tls` is that of this process, for a port that uses TLS.

    Raises:
        TelemetryError: the token file cannot be used.
    """
    if not port.metrics_listen:
        return nullcontext("")
    route = metrics_route(registry_of(*collectors), token_file=port.metrics_token_file)
    return serving_http([route], listen=port.metrics_listen, tls=tls)

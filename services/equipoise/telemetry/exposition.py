"""A small HTTP server on the process's own event loop: `/metrics`, and what else it is given.

On the event loop and not on a thread, because collectors read state that the loop changes.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from equipoise.telemetry.errors import TelemetryError

_LAST_WORDS_S = 1
"""Seconds that open answers have when the server stops."""

_log = logging.getLogger(__name__)


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """A registry of its own, with `collectors` and what every process tells of itself."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    return registry


def metrics_route(registry: CollectorRegistry) -> Route:
    """`GET /metrics` in the form that the asker prefers."""

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return Route("/metrics", metrics)


@asynccontextmanager
async def serving_http(
    routes: Sequence[BaseRoute],
    *,
    listen: str,
    what: str = "metrics",
    path: str = "/metrics",
    max_connections: int | None = None,
) -> AsyncIterator[str]:
    """Serve `routes` on `listen` (host:port, port 0: a free one) inside the block; gives host:port.

    `what` and `path` are for people: what is there (`--WHAT-listen` chooses where), and where in it
    to look first. Beyond `max_connections`, requests are answered 503.

    Raises:
        TelemetryError: the address cannot be listened on.
    """
    listener = _listen(listen, what=what)
    server = _Server(
        uvicorn.Config(
            Starlette(routes=routes),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
    )
    address = f"{listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        _log.info("%s at http://%s%s", what, address, path)
        yield address
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


def metrics_at(
    listen: str, *collectors: Collector, routes: Sequence[BaseRoute] = ()
) -> AbstractAsyncContextManager[str]:
    """Serve `/metrics` of `collectors`, and `routes`, on `listen`, host:port; nothing if empty."""
    if not listen:
        return nullcontext("")
    return serving_http([metrics_route(registry_of(*collectors)), *routes], listen=listen)


class _Server(uvicorn.Server):
    """uvicorn whose stop is ours to order: signals are the process's business."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _listen(address: str, *, what: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family)
    except (OSError, ValueError) as error:
        raise TelemetryError(
            f"cannot serve {what} on {address}: {error}; choose another host:port with "
            f"--{what}-listen"
        ) from error

"""Metrics over HTTP: `/metrics` and whatever else a process serves on that port.

The server runs on the event loop, not on a thread, because collectors read state that the loop
changes.
"""

import asyncio
import gzip
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version

import uvicorn
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, gzip_accepted
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

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

    However many clients scrape, the metrics take a bounded share of the event loop's time.

    With a `token_file`, requests without its bearer token get 401.

    Raises:
        TelemetryError: the token file cannot be used.
    """
    scrapes = _Scrapes(registry)
    token = ScrapeToken(token_file) if token_file else None

    async def metrics(request: Request) -> Response:
        if token is not None and not token.accepts(request.headers.get("authorization", "")):
            return PlainTextResponse(
                "this port requires the bearer token of --metrics-token-file\n",
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await scrapes.answer(request.headers)

    return Route("/metrics", metrics)


class _Scrapes:
    """Answers scrapes: all that wait at a time get the same text, once their form is rendered.

    Whoever reaches the port may send as many requests as they like, so renderings together take at
    most a share of the loop's time, and another client's requests add at most the rendering of
    each other form to a scrape.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()
        self._next_s = 0.0
        self._latest: dict[_Form, tuple[float, bytes]] = {}

    async def answer(self, headers: Headers) -> Response:
        """The metrics, no older than this call."""
        asked_s = time.monotonic()
        form = _Form(
            is_open=openmetrics.CONTENT_TYPE_LATEST.partition(";")[0] in headers.get("accept", ""),
            is_gzip=gzip_accepted(headers.get("accept-encoding", "")),
        )
        async with self._turn:
            began_s, body = self._latest.get(form, (-math.inf, b""))
            if began_s < asked_s:
                await asyncio.sleep(self._next_s - time.monotonic())
                began_s, used_s = time.monotonic(), time.thread_time()
                body = form.render(self._registry)
                used_s = time.thread_time() - used_s
                self._next_s = time.monotonic() + used_s * (1 / _SHARE_OF_LOOP - 1)
                self._latest[form] = began_s, body
        return _BoundedResponse(body, headers=form.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """In which of the formats that a client accepts it gets the metrics."""

    is_open: bool
    """OpenMetrics rather than Prometheus' own text."""
    is_gzip: bool
    """Compressed."""

    @property
    def headers(self) -> dict[str, str]:
        kind = openmetrics.CONTENT_TYPE_LATEST if self.is_open else CONTENT_TYPE_PLAIN_0_0_4
        return {"Content-Type": kind} | ({"Content-Encoding": "gzip"} if self.is_gzip else {})

    def render(self, registry: CollectorRegistry) -> bytes:
        text = (openmetrics.generate_latest if self.is_open else generate_latest)(registry)
        return gzip.compress(text) if self.is_gzip else text


class _BoundedResponse(Response):
    """A response whose client has `SEND_S` to take it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_S):
                await super().__call__(scope, receive, send)


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

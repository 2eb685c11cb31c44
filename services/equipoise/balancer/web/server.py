"""The HTTP server of the web page: files, state as JSON, events and security headers."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from equipoise.balancer.web.state import PageState
from equipoise.balancer.web.stream import MAX_CLIENTS, EventStreams
from equipoise.settings.address import parse_address
from equipoise.telemetry.exposition import serving_http

MAX_CONNECTIONS = 4 * MAX_CLIENTS
"""Concurrent connections; further ones get 503."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: nothing external is loaded, and nothing is framed or cached."""

_TYPE_OF_FILE = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("page.js", "view.js", "balance.js", "heat.js", "elements.js"),
        "text/javascript; charset=utf-8",
    ),
}
_LOOPBACK_NAMES = {"127.0.0.1", "localhost", "[::1]"}


@asynccontextmanager
async def serving_page(
    state: PageState, *, listen: str, routes: Sequence[BaseRoute] = ()
) -> AsyncIterator[str]:
    """Serve `routes` and the page on `listen` inside the block; yields host:port.

    Raises:
        TelemetryError: the address is not available.
    """
    streams = EventStreams(state)
    page = page_routes(state, streams, hosts=_hosts_of(listen))
    async with serving_http(
        [*routes, page],
        listen=listen,
        what="web",
        path="/",
        max_connections=MAX_CONNECTIONS,
    ) as address:
        try:
            yield address
        finally:
            streams.close()


def page_routes(state: PageState, streams: EventStreams, *, hosts: frozenset[str]) -> Mount:
    """Return the routes of the page. Unless `hosts` is empty, other Host headers get 421."""

    async def as_json(request: Request) -> Response:
        """`GET /state.json?pool=NAME`: the first events of a stream."""
        events = await state.events(request.query_params.get("pool", ""))
        body = ",".join(f"{json.dumps(event)}:{data}" for event, data in events.items())
        return Response(f"{{{body}}}", media_type="application/json")

    own = [Route("/", _file("page.html")), Route("/events", streams.answer)]
    own += [Route(f"/{name}", _file(name)) for name in _TYPE_OF_FILE if name != "page.html"]
    own.append(Route("/state.json", as_json))
    return Mount("/", routes=own, middleware=[Middleware(_Fence, hosts=hosts)])


def _file(name: str) -> ASGIApp:
    """Return a handler for a file of this package, which is read once."""
    content = files("equipoise.balancer.web").joinpath(name).read_bytes()
    media_type = _TYPE_OF_FILE[name]

    async def answer(_: Request) -> Response:
        return Response(content, headers={"Content-Type": media_type})

    return answer  # type: ignore[return-value]  # Route takes either


def _hosts_of(listen: str) -> frozenset[str]:
    """Return the valid Host headers of a page on loopback; empty (any) if it listens elsewhere.

    Prevents DNS rebinding: a foreign page whose name resolves to this machine.
    """
    host = parse_address(listen).host
    return frozenset(_LOOPBACK_NAMES | {host}) if host in _LOOPBACK_NAMES else frozenset()


class _Fence:
    """Adds the headers to every response, and rejects unknown Host headers."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def fenced(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if self._hosts and _host(Headers(scope=scope).get("host", "")) not in self._hosts:
            message = f"this page is served for {', '.join(sorted(self._hosts))} only\n"
            app = PlainTextResponse(message, status_code=421)
        await app(scope, receive, fenced)


def _host(header: str) -> str:
    host, colon, port = header.rpartition(":")
    return host if colon and port.isdigit() else header

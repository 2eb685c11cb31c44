"""`/livez` and `/readyz`: health probes for clients without a certificate.

The kubelet's gRPC probes do not support TLS, so a process that requires client certificates is
probed over HTTP, at a port of its own that scrapers cannot exhaust. The response reveals nothing
but the state.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from equipoise.telemetry.exposition import serving_http


def probes_at(
    listen: str, *, ready: Callable[[], bool], live: Callable[[], bool] = lambda: True
) -> AbstractAsyncContextManager[str]:
    """Serve the probes on `listen`, and yield host:port; nothing if `listen` is empty.

    `GET /livez` answers 200 while the event loop runs, unless `live` says otherwise, and
    `GET /readyz` 200 or 503.

    Raises:
        TelemetryError: the address cannot be listened on.
    """

    async def livez(_request: Request) -> PlainTextResponse:
        if live():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not live\n", status_code=503)

    async def readyz(_request: Request) -> PlainTextResponse:
        if ready():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    if not listen:
        return nullcontext("")
    routes = Route("/livez", livez), Route("/readyz", readyz)
    return serving_http(routes, listen=listen, what="probes", path="/readyz")

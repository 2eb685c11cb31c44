"""`/livez` and `/readyz`: health probes for clients without a certificate.

The kubelet's gRPC probes do not support TLS, so a process that requires client certificates is
probed over HTTP. The response reveals nothing but the state.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route


def probe_routes(*, ready: Callable[[], bool]) -> tuple[Route, Route]:
    """`GET /livez`, which answers 200 while the event loop runs, and `GET /readyz`: 200 or 503."""

    async def livez(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> PlainTextResponse:
        if ready():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    return Route("/livez", livez), Route("/readyz", readyz)

"""`/livez` and `/readyz`: whether a process is well, for whoever can show no certificate.

A kubelet's gRPC probes speak no TLS, so that a process which asks its callers for certificates is
probed here. The answer is a word and reveals nothing else.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route


def probe_routes(*, ready: Callable[[], bool]) -> tuple[Route, Route]:
    """`GET /livez`, answered 200 as long as the event loop turns, and `/readyz`: 200 or 503."""

    async def livez(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> PlainTextResponse:
        if ready():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    return Route("/livez", livez), Route("/readyz", readyz)

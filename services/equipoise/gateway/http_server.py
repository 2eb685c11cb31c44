"""`http_server`: uvicorn with a timeout for every wait for a client."""

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from equipoise.gateway.errors import HeaderTooLongError, InvalidRequestError, RequestError
from equipoise.gateway.openai_responses import error_object
from equipoise.telemetry.http import HttpServer, bounded_http
from equipoise.telemetry.open_files import most_client_connections

LAST_RESPONSES_S = 5
"""Time to send the responses of requests that were ended with the grace period, seconds."""

MAX_HEADER_BYTES = 2**16
"""Maximum size of a request's header."""


def http_server(app: ASGIApp, *, idle_s: float, header_s: float) -> uvicorn.Server:
    """Build a server of this application.

    A connection may be idle for `idle_s` seconds between two requests. A request's header may take
    `header_s` seconds from the start of the connection or the end of the last request. Clients
    have as many connections as the system allows beside those to ranks; one more closes the oldest
    idle one.
    """
    return HttpServer(
        uvicorn.Config(
            StrictHeaders(app),
            http=bounded_http(
                header_s=header_s,
                max_connections=most_client_connections(),
                ends_requests=False,
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=max(1, round(idle_s)),
            timeout_graceful_shutdown=LAST_RESPONSES_S,
        )
    )


class StrictHeaders:
    """An ASGI application that rejects requests whose headers are too long or ambiguous.

    Their connections are closed: proxies may see the end of such a request elsewhere.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 400 or 431."""
        headers = scope["headers"]
        names = {name.lower() for name, _ in headers}
        target = (scope["raw_path"], scope["query_string"])
        error: RequestError | None = None
        if sum(map(len, (*target, *(part for one in headers for part in one)))) > MAX_HEADER_BYTES:
            error = HeaderTooLongError(f"the header must have at most {MAX_HEADER_BYTES} bytes")
        elif {b"content-length", b"transfer-encoding"} <= names:
            error = InvalidRequestError("send either Content-Length or Transfer-Encoding, not both")
        if error is None:
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(
            error_object(error), status_code=error.status, headers={"Connection": "close"}
        )
        await answer(scope, receive, send)

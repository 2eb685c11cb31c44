"""`TokenizationEndpoint`: the paths that only tokenize or detokenize, in vLLM's form."""

from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from equipoise.gateway.client import HttpClient
from equipoise.gateway.errors import ClientGoneError
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.settings import GatewaySettings


class TokenizationEndpoint:
    """An ASGI application that answers a body at once, without a rank.

    `answer` raises RequestError for a body that is invalid.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        open_requests: OpenRequests,
        answer: Callable[[bytes], dict[str, Any]],
    ) -> None:
        self._settings = settings
        self._open_requests = open_requests
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        client = HttpClient(scope, receive, send, timeout_s=self._settings.client_timeout_s)
        try:
            body = await client.body(
                max_bytes=self._settings.max_body_bytes, arriving=self._open_requests.arriving
            )
            with self._open_requests.admitted():
                await client.send_json(await self._open_requests.parsed(body, self._answer))
        except ClientGoneError:
            return

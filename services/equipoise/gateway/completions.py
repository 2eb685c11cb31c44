"""`Completions`: `POST /v1/completions`, from the body's bytes to the last event.

Owns how one request is read and answered over HTTP. What OpenAI's objects look like is `openai`'s,
where tokens come from is `relay`'s business.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from equipoise.gateway.attempt import Finish, TokenRequest
from equipoise.gateway.errors import (
    BodyTooLargeError,
    BodyTooSlowError,
    ClientGoneError,
    RequestError,
)
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.openai import (
    CompletionForm,
    CompletionRequest,
    Limits,
    error_object,
    parse_completion,
)
from equipoise.gateway.relay import Relay
from equipoise.gateway.tokenizer import ByteTokenizer, StopText

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What HTTP clients may take: bytes of a body, and seconds to send it or to read a piece."""

    max_body_bytes: int
    client_timeout_s: float


class Completions:
    """An ASGI application; errors before the first byte of an answer are raised as RequestError."""

    def __init__(
        self,
        relay: Relay,
        *,
        tokenizer: ByteTokenizer,
        model: str,
        limits: Limits,
        http_limits: HttpLimits,
        open_requests: OpenRequests,
    ) -> None:
        self._relay = relay
        self._tokenizer = tokenizer
        self._model = model
        self._limits = limits
        self._http = http_limits
        self._open = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self._open.check()
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        client = _Client(scope, receive, send, timeout_s=self._http.client_timeout_s)
        try:
            asked = parse_completion(
                await self._body(scope, receive),
                model=self._model,
                tokenizer=self._tokenizer,
                limits=self._limits,
            )
            form = CompletionForm(
                completion_id=completion_id,
                model=self._model,
                created_s=int(time.time()),
                prompt=asked.prompt,
                return_token_ids=asked.return_token_ids,
            )
            answer = self._stream if asked.stream else self._whole
            await self._open.run(answer(asked, form, client), receive=receive)
        except ClientGoneError as gone:
            _log.info("%s: %s", completion_id, gone)
        except RequestError as error:
            if not client.is_streaming:
                raise
            _log.warning("%s: %s", completion_id, error)
            await client.end_stream(error_object(error))

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._http.client_timeout_s):
                async for chunk in Request(scope, receive).stream():
                    body += chunk
                    if len(body) > self._http.max_body_bytes:
                        raise BodyTooLargeError(
                            f"the body may have {self._http.max_body_bytes} bytes"
                        )
        except TimeoutError:
            raise BodyTooSlowError(
                f"the body did not arrive within {self._http.client_timeout_s:g} s"
            ) from None
        except ClientDisconnect:
            raise ClientGoneError("the client hung up before its request was complete") from None
        return bytes(body)

    async def _whole(
        self, asked: CompletionRequest, form: CompletionForm, client: "_Client"
    ) -> None:
        text: list[str] = []
        tokens: list[int] = []
        finish = None
        async with aclosing(self._pieces(asked, form)) as pieces:
            async for piece in pieces:
                text.append(piece.text)
                tokens += piece.tokens
                finish = piece.finish
        usage = form.usage(len(tokens))
        await client.send_json(
            form.part("".join(text), tokens=tuple(tokens), finish=finish, usage=usage)
        )

    async def _stream(
        self, asked: CompletionRequest, form: CompletionForm, client: "_Client"
    ) -> None:
        no_usage = {"usage": None} if asked.include_usage else {}
        num_tokens = 0
        async with aclosing(self._pieces(asked, form)) as pieces:
            async for piece in pieces:
                num_tokens += len(piece.tokens)
                if piece.text or piece.finish or asked.return_token_ids:
                    part = form.part(
                        piece.text, tokens=piece.tokens, finish=piece.finish, **no_usage
                    )
                    await client.send_event(part)
        if asked.include_usage:
            await client.send_event(form.usage_part(num_tokens))
        await client.end_stream("[DONE]")

    async def _pieces(
        self, asked: CompletionRequest, form: CompletionForm
    ) -> AsyncGenerator["_Piece", None]:
        """The answer as its tokens are made, up to a stop string if one comes."""
        request = TokenRequest(
            request_id=form.completion_id,
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            stop_tokens=asked.stop_tokens,
        )
        spelling, stop = self._tokenizer.spelling(), StopText(asked.stops)
        async with aclosing(self._relay.stream(request)) as parts:
            async for made in parts:
                is_last = made.finish is not None
                text = stop.read(spelling.read(made.tokens, final=is_last), final=is_last)
                finish = Finish.STOP if stop.stopped else made.finish
                yield _Piece(text=text, tokens=made.tokens, finish=finish)
                if finish is not None:
                    return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    text: str
    tokens: tuple[int, ...]
    finish: Finish | None


class _Client:
    """Whom a request is answered to; one that does not read within the bound is gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, timeout_s: float) -> None:
        self.is_streaming = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s

    async def send_json(self, document: dict[str, Any]) -> None:
        """The whole answer."""
        async with self._bounded():
            await JSONResponse(document)(self._scope, self._receive, self._send)

    async def send_event(self, data: dict[str, Any] | str) -> None:
        """One server-sent event; the first one opens the stream."""
        await self._write(data, is_last=False)

    async def end_stream(self, data: dict[str, Any] | str) -> None:
        """The last event."""
        await self._write(data, is_last=True)

    async def _write(self, data: dict[str, Any] | str, *, is_last: bool) -> None:
        words = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        async with self._bounded():
            if not self.is_streaming:
                self.is_streaming = True
                await self._send(_STREAM_START)
            await self._send(
                {
                    "type": "http.response.body",
                    "body": f"data: {words}\n\n".encode(),
                    "more_body": not is_last,
                }
            )

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise ClientGoneError(
                f"the client did not read for {self._timeout_s:g} s (client)"
            ) from None
        except OSError as error:
            raise ClientGoneError(f"the client hung up: {error}") from None


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # Proxies of nginx's kind keep events to themselves otherwise.
        (b"x-accel-buffering", b"no"),
    ],
}

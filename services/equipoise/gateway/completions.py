"""`CompletionEndpoint`: a path that generates text, from the body's bytes to the last event.

`openai_requests` parses the body, `openai_responses` builds the objects, `relay` supplies tokens.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any

from starlette.types import Receive, Scope, Send

from equipoise.gateway.choice import ChoiceDecoder, ChoiceDelta, merged_deltas
from equipoise.gateway.client import HttpClient
from equipoise.gateway.errors import ClientGoneError, RequestError
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.openai_requests import CompletionRequest
from equipoise.gateway.openai_responses import (
    ChatForm,
    CompletionForm,
    ResponseContext,
    error_object,
    usage,
)
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.wire.inference import GeneratedTokens, GenerateRequest

LONG_BODY_BYTES = 2**16
"""Longer bodies are parsed one at a time, so that they do not hold up short ones."""

_log = logging.getLogger(__name__)


class CompletionEndpoint:
    """An ASGI application; errors before the first byte of a response are raised as RequestError.

    `parse` turns a body into a request; `form` builds the response objects.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        relay: Relay,
        tokenizer: Tokenizer,
        open_requests: OpenRequests,
        parse: Callable[[bytes], CompletionRequest],
        form: CompletionForm | ChatForm,
    ) -> None:
        self._settings = settings
        self._model = settings.model_name
        self._relay = relay
        self._tokenizer = tokenizer
        self._open_requests = open_requests
        self._parse = parse
        self._form = form
        self._long_turn = asyncio.Semaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        client = HttpClient(scope, receive, send, timeout_s=self._settings.client_timeout_s)
        response_id = f"{self._form.prefix}-{uuid.uuid4().hex}"
        try:
            body = await client.body(
                max_bytes=self._settings.max_body_bytes, arriving=self._open_requests.arriving
            )
            with self._open_requests.admitted():
                await self._respond(client, receive, response_id, body)
        except ClientGoneError as gone:
            _log.info("%s: %s", response_id, gone)

    async def _respond(
        self, client: HttpClient, receive: Receive, response_id: str, body: bytes
    ) -> None:
        try:
            request = await self._parsed(body)
            context = ResponseContext(
                response_id=response_id,
                model=self._model,
                created_s=int(time.time()),
                tokenizer=self._tokenizer,
                with_logprobs=request.sampling.logprobs is not None,
                with_token_ids=request.return_token_ids,
            )
            respond = self._stream if request.stream else self._whole
            await self._open_requests.run(respond(request, context, client), receive=receive)
        except RequestError as error:
            if not client.is_streaming:
                raise
            _log.warning("%s: %s", response_id, error)
            await client.send_event(error_object(error), is_last=True)

    async def _parsed(self, body: bytes) -> CompletionRequest:
        """Parse in a thread, because a long text takes time to tokenize; long ones take turns."""
        async with self._long_turn if len(body) > LONG_BODY_BYTES else nullcontext():
            return await asyncio.to_thread(self._parse, body)

    async def _whole(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        parts: list[list[ChoiceDelta]] = [[] for _ in range(request.num_choices)]
        async with aclosing(self._deltas(request, context)) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        wholes = [_joined(request.echo, choice) for choice in parts]
        counts = usage(
            num_prompt=len(request.prompt), num_generated=sum(len(one.tokens) for one in wholes)
        )
        await client.send_json(self._form.whole(context, dict(enumerate(wholes)), usage=counts))

    async def _stream(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        more: dict[str, Any] = {"usage": None} if request.include_usage else {}
        opened: set[int] = set()
        num_generated = 0
        async with aclosing(self._deltas(request, context)) as deltas:
            async for index, received in deltas:
                num_generated += len(received.tokens)
                delta = received
                if index not in opened:
                    opened.add(index)
                    delta = replace(delta, text=request.echo + delta.text)
                    if opening := self._form.opening(context, index):
                        await client.send_event({**opening, **more})
                if delta.text or delta.shown or delta.finish or request.return_token_ids:
                    await client.send_event(self._form.part(context, {index: delta}, **more))
        if request.include_usage:
            counts = usage(num_prompt=len(request.prompt), num_generated=num_generated)
            await client.send_event(self._form.part(context, {}, usage=counts))
        await client.send_event("[DONE]", is_last=True)

    def _deltas(
        self, request: CompletionRequest, context: ResponseContext
    ) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """All choices as their tokens are generated, each up to a stop string if there is one."""
        suspicion = Suspicion()

        def choice(index: int) -> tuple[ChoiceDecoder, AsyncGenerator[GeneratedTokens, None]]:
            decoder = ChoiceDecoder(
                self._tokenizer, stops=request.stops, stop_tokens=request.stop_tokens
            )
            tokens = self._relay.stream(
                GenerateRequest(
                    request_id=context.response_id + (f"-{index}" if index else ""),
                    prompt=request.prompt,
                    max_tokens=request.max_tokens,
                    stop_tokens=request.stop_tokens,
                    sampling=replace(
                        request.sampling, seed=(request.sampling.seed + index) % 2**64
                    ),
                ),
                suspicion=suspicion,
                is_complete=lambda: decoder.stopped,
            )
            return decoder, tokens

        return merged_deltas([choice(index) for index in range(request.num_choices)])


def _joined(echo: str, deltas: list[ChoiceDelta]) -> ChoiceDelta:
    return ChoiceDelta(
        text=echo + "".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        shown=tuple(one for delta in deltas for one in delta.shown),
        finish=deltas[-1].finish,
    )

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

from equipoise.gateway.choice import ChoiceDecoder, ChoiceDelta, Echo, merged_deltas
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
from equipoise.gateway.reasoning import ReasoningSplit
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.gateway.tool_calls import merged
from equipoise.wire.inference_messages import GeneratedTokens, GenerateRequest

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
                request=request,
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
        parts: list[list[ChoiceDelta]] = [[] for _ in range(request.num_all_choices)]
        async with aclosing(self._deltas(request, context)) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        wholes = [_joined(choice) for choice in parts]
        counts = usage(
            num_prompt=sum(map(len, request.prompts)),
            num_generated=sum(len(one.tokens) for one in wholes),
            num_cached=sum(map(_num_cached, wholes[:: request.num_choices])),
        )
        await client.send_json(self._form.whole(context, dict(enumerate(wholes)), usage=counts))

    async def _stream(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        num_generated = [0] * request.num_all_choices
        num_cached = 0

        def more(index: int) -> dict[str, Any]:
            """The usage of an event, which vLLM's continuous usage counts for the choice alone."""
            if not request.continuous_usage:
                return {"usage": None} if request.include_usage else {}
            num_prompt = len(request.prompts[index // request.num_choices])
            return {"usage": usage(num_prompt=num_prompt, num_generated=num_generated[index])}

        async with aclosing(self._deltas(request, context)) as deltas:
            async for index, delta in deltas:
                if delta.is_first:
                    num_cached += _num_cached(delta) if index % request.num_choices == 0 else 0
                    if opening := self._form.opening(context, index):
                        await client.send_event({**opening, **more(index)})
                num_generated[index] += len(delta.tokens)
                if _shows(delta) or request.return_token_ids:
                    await client.send_event(self._form.part(context, {index: delta}, **more(index)))
        if request.include_usage:
            counts = usage(
                num_prompt=sum(map(len, request.prompts)),
                num_generated=sum(num_generated),
                num_cached=num_cached,
            )
            await client.send_event(self._form.part(context, {}, usage=counts))
        await client.send_event("[DONE]", is_last=True)

    def _deltas(
        self, request: CompletionRequest, context: ResponseContext
    ) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """All choices as their tokens are generated, each up to a stop string if there is one."""
        suspicion = Suspicion()

        def choice(index: int) -> tuple[ChoiceDecoder, AsyncGenerator[GeneratedTokens, None]]:
            which_prompt, which = divmod(index, request.num_choices)
            prompt = request.prompts[which_prompt]
            echo = Echo(
                tokens=prompt,
                with_logprobs=request.sampling.logprobs is not None,
                is_all=request.max_tokens == 0,
            )
            decoder = ChoiceDecoder(
                self._tokenizer,
                stops=request.stops,
                stop_tokens=request.stop_tokens,
                min_tokens=request.min_tokens,
                with_special=request.with_special,
                echo=echo if request.echo else None,
                reasoning=ReasoningSplit() if request.splits_reasoning else None,
                tools=request.tools.split(),
            )
            tokens = self._relay.stream(
                GenerateRequest(
                    request_id=context.response_id + (f"-{index}" if index else ""),
                    prompt=prompt,
                    max_tokens=max(1, request.max_tokens),
                    stop_tokens=request.stop_tokens,
                    sampling=replace(
                        request.sampling, seed=(request.sampling.seed + which) % 2**64
                    ),
                    prompt_logprobs=request.prompt_logprobs,
                    min_tokens=request.min_tokens,
                    logit_bias=request.logit_bias,
                    grammar=request.grammar,
                ),
                suspicion=suspicion,
                is_complete=lambda: decoder.stopped,
            )
            return decoder, tokens

        return merged_deltas([choice(index) for index in range(request.num_all_choices)])


def _shows(delta: ChoiceDelta) -> bool:
    return bool(delta.text or delta.reasoning or delta.calls or delta.shown or delta.finish)


def _num_cached(first: ChoiceDelta) -> int:
    """Tokens of a choice's prompt that its rank had in its cache."""
    return 0 if first.prompt is None else first.prompt.num_cached


def _joined(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    return ChoiceDelta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=merged(call for delta in deltas for call in delta.calls),
        ends_with_calls=deltas[-1].ends_with_calls,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        shown=tuple(one for delta in deltas for one in delta.shown),
        finish=deltas[-1].finish,
        is_first=True,
        prompt=deltas[0].prompt,
    )

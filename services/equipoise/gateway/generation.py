"""`GenerationEndpoint`: a path that generates text, from the body's bytes to the ranks' tokens.

`openai_requests` parses the body, `relay` supplies tokens; subclasses send what becomes of them.
"""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from equipoise.gateway.choice import ChoiceDecoder, ChoiceDelta, Echo, merged_deltas
from equipoise.gateway.client import HttpClient
from equipoise.gateway.completion_request import CompletionRequest
from equipoise.gateway.errors import ClientGoneError, RequestError
from equipoise.gateway.metrics import Outcome
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.openai_responses import ResponseContext, error_object
from equipoise.gateway.reasoning import ReasoningSplit
from equipoise.gateway.relay import Relay
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.wire.inference_messages import GeneratedTokens, GenerateRequest

_log = logging.getLogger(__name__)


class GenerationEndpoint(ABC):
    """An ASGI application; errors before the first byte of a response are raised as RequestError.

    `parse` turns a body into a request; `prefix` begins the responses' ids.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        relay: Relay,
        tokenizer: Tokenizer,
        open_requests: OpenRequests,
        parse: Callable[[bytes], CompletionRequest],
        prefix: str,
    ) -> None:
        self._settings = settings
        self._model = settings.model_name
        self._relay = relay
        self._tokenizer = tokenizer
        self._open_requests = open_requests
        self._parse = parse
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        client = HttpClient(scope, receive, send, timeout_s=self._settings.client_timeout_s)
        response_id = f"{self._prefix}{uuid.uuid4().hex}"
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
            request = await self._open_requests.parsed(body, self._parse)
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
            note_failure(response_id, error)
            await client.send_event(error_object(error), is_last=True)

    @abstractmethod
    async def _whole(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        """Send the response at once."""

    @abstractmethod
    async def _stream(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        """Send the response as it is generated."""

    def _deltas(
        self, request: CompletionRequest, context: ResponseContext
    ) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """All choices as their tokens are generated, each up to a stop string if there is one."""
        suspicion = Suspicion()

        def choice(index: int) -> tuple[ChoiceDecoder, AsyncGenerator[GeneratedTokens, None]]:
            prompt = request.prompts[index // request.num_choices]
            echo = Echo(
                tokens=prompt,
                with_logprobs=request.show_logprobs,
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

            def closed() -> Outcome:
                if decoder.stopped:
                    return Outcome.FINISHED
                return Outcome.FAILED if self._open_requests.is_over else Outcome.ENDED

            tokens = self._relay.stream(
                GenerateRequest(
                    request_id=context.response_id + (f"-{index}" if index else ""),
                    prompt=prompt,
                    max_tokens=max(1, request.max_tokens),
                    stop_tokens=request.stop_tokens,
                    sampling=replace(request.sampling, seed=request.seed_of(index)),
                    prompt_logprobs=request.prompt_logprobs,
                    min_tokens=request.min_tokens,
                    logit_bias=request.logit_bias,
                    grammar=request.grammar,
                ),
                suspicion=suspicion,
                if_closed=closed,
            )
            return decoder, tokens

        return merged_deltas([choice(index) for index in range(request.num_all_choices)])


def note_failure(response_id: str, error: RequestError) -> None:
    """Log that a response ended early, where its status could not say so any more."""
    _log.warning("%s: %s", response_id, error)

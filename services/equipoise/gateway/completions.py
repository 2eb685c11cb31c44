"""`Completions`: a path that makes text, from the body's bytes to the last event.

Owns how one request is answered over HTTP, whole or in a stream. What is asked is `asked`'s, what
OpenAI's objects look like is `answers`', where tokens come from is `relay`'s business.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from equipoise.gateway.answers import Answer, ChatForm, CompletionForm, Told, error_object, usage
from equipoise.gateway.asked import Asked
from equipoise.gateway.attempt import Finish, Made, TokenRequest
from equipoise.gateway.choice import Choice, Piece, TokenText, pieces
from equipoise.gateway.client import Client
from equipoise.gateway.errors import ClientGoneError, RequestError
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.relay import Relay
from equipoise.gateway.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What HTTP clients may take: bytes of a body, and seconds to send it or to read a piece."""

    max_body_bytes: int
    client_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What serves every path alike."""

    relay: Relay
    tokenizer: Tokenizer
    model: str
    http_limits: HttpLimits
    open_requests: OpenRequests


class Completions:
    """An ASGI application; errors before the first byte of an answer are raised as RequestError.

    `read` makes sense of a body, `form` tells the answer.
    """

    def __init__(
        self,
        service: Service,
        *,
        read: Callable[[bytes], Asked],
        form: CompletionForm | ChatForm,
    ) -> None:
        self._service = service
        self._read = read
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with self._service.open_requests.admitted():
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        answer = Answer(
            answer_id=f"{self._form.prefix}-{uuid.uuid4().hex}",
            model=service.model,
            created_s=int(time.time()),
            tokenizer=service.tokenizer,
        )
        client = Client(scope, receive, send, timeout_s=service.http_limits.client_timeout_s)
        try:
            body = await client.body(max_bytes=service.http_limits.max_body_bytes)
            # In a thread: long texts take their time to become tokens.
            asked = await asyncio.to_thread(self._read, body)
            tell = self._stream if asked.stream else self._whole
            await service.open_requests.run(tell(asked, answer, client), receive=receive)
        except ClientGoneError as gone:
            _log.info("%s: %s", answer.answer_id, gone)
        except RequestError as error:
            if not client.is_streaming:
                raise
            _log.warning("%s: %s", answer.answer_id, error)
            await client.end_stream(error_object(error))

    async def _whole(self, asked: Asked, answer: Answer, client: Client) -> None:
        gathered = [_Gathered(asked.echo) for _ in range(asked.num_choices)]
        async with aclosing(self._pieces(asked, answer)) as coming:
            async for index, piece in coming:
                gathered[index].add(piece)
        wholes = [one.piece() for one in gathered]
        told = [_told(asked, index, whole) for index, whole in enumerate(wholes)]
        num_made = sum(len(whole.tokens) for whole in wholes)
        counted = usage(num_prompt=len(asked.prompt), num_made=num_made)
        await client.send_json(self._form.whole(answer, told, usage=counted))

    async def _stream(self, asked: Asked, answer: Answer, client: Client) -> None:
        more: dict[str, Any] = {"usage": None} if asked.include_usage else {}
        opened: set[int] = set()
        num_made = 0
        async with aclosing(self._pieces(asked, answer)) as coming:
            async for index, made in coming:
                num_made += len(made.tokens)
                piece = made
                if index not in opened:
                    opened.add(index)
                    piece = replace(made, text=asked.echo + made.text)
                    if opening := self._form.opening(answer, index):
                        await client.send_event({**opening, **more})
                if piece.text or piece.spelled or piece.finish or asked.return_token_ids:
                    told = _told(asked, index, piece)
                    await client.send_event(self._form.part(answer, [told], **more))
        if asked.include_usage:
            counted = usage(num_prompt=len(asked.prompt), num_made=num_made)
            await client.send_event(self._form.part(answer, [], usage=counted))
        await client.end_stream("[DONE]")

    def _pieces(self, asked: Asked, answer: Answer) -> AsyncGenerator[tuple[int, Piece], None]:
        """The choices as their tokens are made, each up to a stop string if one comes."""

        def choice(index: int) -> tuple[Choice, AsyncGenerator[Made, None]]:
            request = TokenRequest(
                request_id=f"{answer.answer_id}-{index}" if index else answer.answer_id,
                prompt=asked.prompt,
                max_tokens=asked.max_tokens,
                stop_tokens=asked.stop_tokens,
                sampling=replace(asked.sampling, seed=(asked.sampling.seed + index) % 2**64),
            )
            reader = Choice(
                self._service.tokenizer, stops=asked.stops, stop_tokens=asked.stop_tokens
            )
            return reader, self._service.relay.stream(request)

        return pieces([choice(index) for index in range(asked.num_choices)])


class _Gathered:
    """All pieces of one choice so far."""

    def __init__(self, echo: str) -> None:
        self._texts = [echo]
        self._tokens: list[int] = []
        self._spelled: list[TokenText] = []
        self._finish: Finish | None = None

    def add(self, piece: Piece) -> None:
        """One more."""
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        self._spelled += piece.spelled
        self._finish = piece.finish

    def piece(self) -> Piece:
        """All as one."""
        return Piece(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            spelled=tuple(self._spelled),
            finish=self._finish,
        )


def _told(asked: Asked, index: int, piece: Piece) -> Told:
    return Told(
        index=index,
        text=piece.text,
        finish=piece.finish,
        spelled=piece.spelled if asked.sampling.logprobs is not None else None,
        token_ids=piece.tokens if asked.return_token_ids else None,
    )

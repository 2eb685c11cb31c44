"""One attempt: a request at one rank, its tokens checked and every wait bounded.

Owns the call and what a rank's faults are called. Must not know other ranks: what to do about a
fault is `relay`'s business.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import grpc

from equipoise.gateway.errors import InvalidRequestError, RankFullError, RankLostError
from equipoise.trust.credentials import Credentials
from equipoise.wire.inference import BLAME_KEY, Blame
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc


class Finish(StrEnum):
    """Why a request ended, in OpenAI's words."""

    LENGTH = "length"
    STOP = "stop"


_SAID = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.STOP: pb.FINISH_REASON_STOP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How ranks choose tokens; the fields and their ranges are those of the contract's Sampling.

    `logprobs` is None, or how many of the likeliest tokens are told with each.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """What is asked of the ranks: at most `max_tokens` (>= 1) tokens behind `prompt`.

    The first of `stop_tokens` ends it and is part of the output. The last `num_replayed` tokens of
    the prompt are output of ranks that broke.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    num_replayed: int = 0

    def after(self, made: tuple[int, ...]) -> "TokenRequest":
        """What is left to be asked when these tokens are made: any rank goes on the same."""
        return replace(
            self,
            prompt=self.prompt + made,
            max_tokens=self.max_tokens - len(made),
            num_replayed=self.num_replayed + len(made),
        )

    def message(self) -> pb.GenerateRequest:
        """The same as ranks are asked."""
        return pb.GenerateRequest(
            request_id=self.request_id,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            stop_tokens=sorted(self.stop_tokens),
            sampling=pb.Sampling(**asdict(self.sampling)),
            num_replayed=self.num_replayed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The natural logarithm of a token's probability, and the likeliest tokens with theirs."""

    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Tokens in order; `finish` is set on the last of the request.

    `logprobs` has one for each token, or nothing if they were not asked for.
    """

    tokens: tuple[int, ...]
    finish: Finish | None
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds a rank may take: into its line, to the first token, and from one to the next."""

    accept_s: float
    first_token_s: float
    silence_s: float


async def attempt(
    stub: "pb_grpc.InferenceAsyncStub",
    request: TokenRequest,
    *,
    vocab_size: int,
    bounds: Bounds,
    accepted: Callable[[], None],
    credentials: Credentials,
) -> AsyncGenerator[Made, None]:
    """Tokens of a request as one rank makes them, up to and with its finish.

    `accepted` is called when the rank has taken the request. The end is judged here, not believed:
    every token that comes out is one that the request allows. Closing the generator ends the call.

    Raises:
        RankFullError: the rank has no place in line.
        RankLostError: it broke, is silent, or says what cannot be.
        InvalidRequestError: it cannot serve such a request at all; its own words.
    """
    call = stub.Generate(request.message(), metadata=credentials.metadata())
    try:
        await _until_accepted(call, bounds.accept_s)
        accepted()
        num_made, wait_s = 0, bounds.first_token_s
        while True:
            made = await _next(call, request, num_made, wait_s=wait_s, vocab_size=vocab_size)
            num_made, wait_s = num_made + len(made.tokens), bounds.silence_s
            yield made
            if made.finish is not None:
                return
    except grpc.aio.AioRpcError as error:
        raise _fault(error, credentials) from None
    finally:
        call.cancel()


async def _until_accepted(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse], bound_s: float
) -> None:
    """A worker answers with its metadata as soon as the request stands in line."""
    try:
        async with asyncio.timeout(bound_s):
            await call.initial_metadata()
    except TimeoutError:
        raise RankLostError(f"it did not take the request within {bound_s:g} s (accept)") from None
    if call.done():
        # It was turned away: the reading raises why.
        await call.read()
        raise RankLostError("it ended the stream before the first token")


async def _next(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
    request: TokenRequest,
    num_made: int,
    *,
    wait_s: float,
    vocab_size: int,
) -> Made:
    """The next tokens; messages without any are no sign of life."""
    try:
        async with asyncio.timeout(wait_s):
            while True:
                response = await call.read()
                if not isinstance(response, pb.GenerateResponse):
                    raise RankLostError("it ended the stream without a finish")
                if response.tokens or response.finish_reason:
                    return _checked(response, request, num_made, vocab_size=vocab_size)
    except TimeoutError:
        which = "silence" if num_made else "first token"
        raise RankLostError(f"it made no token for {wait_s:g} s ({which})") from None


def _checked(
    response: pb.GenerateResponse, request: TokenRequest, num_made: int, *, vocab_size: int
) -> Made:
    """A message as far as it can be true; one that cannot is no answer at all."""
    finish: Finish | None = None
    for token in response.tokens:
        num_made += 1
        if finish is not None:
            raise RankLostError(f"it made tokens after the request's end ({finish})")
        if token >= vocab_size:
            raise RankLostError(f"it made token {token}, but tokens are 0 to {vocab_size - 1}")
        if token in request.stop_tokens:
            finish = Finish.STOP
        elif num_made == request.max_tokens:
            finish = Finish.LENGTH
    if response.finish_reason and response.finish_reason != _SAID[finish]:
        said = pb.FinishReason.Name(response.finish_reason)
        raise RankLostError(f"it said {said} after {num_made} of {request.max_tokens} tokens")
    logprobs = tuple(_logprob(one, vocab_size=vocab_size) for one in response.logprobs)
    if len(logprobs) != (len(response.tokens) if request.sampling.logprobs is not None else 0):
        raise RankLostError(f"it told {len(logprobs)} logprobs of {len(response.tokens)} tokens")
    return Made(tokens=tuple(response.tokens), finish=finish, logprobs=logprobs)


def _logprob(told: pb.TokenLogprob, *, vocab_size: int) -> Logprob:
    top = tuple(zip(told.top_tokens, told.top_logprobs, strict=False))
    if len(told.top_tokens) != len(told.top_logprobs) or any(t >= vocab_size for t, _ in top):
        raise RankLostError("it told logprobs of tokens that there are not")
    values = (told.logprob, *(value for _, value in top))
    if any(math.isnan(value) for value in values):
        raise RankLostError("it told a logprob that is no number")
    return Logprob(value=told.logprob, top=top)


def _fault(error: grpc.aio.AioRpcError, credentials: Credentials) -> Exception:
    words = credentials.explain(error.details())
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return RankFullError(words)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(words)
        case code:
            return RankLostError(f"{code.name}: {words}", blame=_blame(error))


def _blame(error: grpc.aio.AioRpcError) -> Blame:
    """What the rank says; a rank that dies says nothing, and the request may be why."""
    metadata: Any = error.trailing_metadata()
    said = dict(metadata).get(BLAME_KEY)
    return next((blame for blame in Blame if blame == said), Blame.STEP)

"""One attempt: a request on one rank, with every wait bounded and every response checked.

Turns a rank's failures into exceptions; `relay` decides what to do about them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from equipoise.gateway.errors import (
    GrammarLimitError,
    InvalidRequestError,
    QueuedTooLongError,
    RankFullError,
    RankLostError,
)
from equipoise.gateway.settings import GatewaySettings
from equipoise.trust.credentials import Credentials
from equipoise.trust.tokens import worker_audience
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference import blame_from_metadata, request_to_proto, response_from_proto
from equipoise.wire.inference_messages import ACCEPTED_KEY, GeneratedTokens, GenerateRequest
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc


async def attempt(
    stub: "pb_grpc.InferenceAsyncStub",
    request: GenerateRequest,
    *,
    vocab_size: int,
    settings: GatewaySettings,
    accepted: Callable[[], None],
    credentials: Credentials,
    pool: str,
    worker: str,
) -> AsyncGenerator[GeneratedTokens, None]:
    """Yield a request's tokens from the rank `worker` of `pool`, up to and including its finish.

    The settings' accept, first-token, silence and rank queue timeouts bound the waits. Calls
    `accepted` once the rank has accepted the request. Closing the generator ends the call.

    Raises:
        RankFullError: the rank's queue is full.
        RankLostError: the rank failed, timed out, or sent an invalid response.
        InvalidRequestError: the rank rejects the request; its own message.
        GrammarLimitError: no rank can continue the request, because of its grammar.
        QueuedTooLongError: the request waited too long for its turn on a rank that works.
    """
    audience = worker_audience(pool, worker)
    call = stub.Generate(
        request_to_proto(request), metadata=credentials.metadata(audience=audience)
    )
    try:
        await _until_accepted(call, settings.accept_timeout_s)
        accepted()
        num_tokens, timeout_s = 0, settings.first_token_timeout_s
        while True:
            generated = await _next(
                call,
                request,
                num_tokens,
                timeout_s=timeout_s,
                queue_timeout_s=settings.rank_queue_timeout_s,
                vocab_size=vocab_size,
            )
            num_tokens, timeout_s = num_tokens + len(generated.tokens), settings.silence_timeout_s
            yield generated
            if generated.finish is not None:
                return
    except grpc.aio.AioRpcError as error:
        raise _failure(error, credentials) from None
    except InvalidMessageError as error:
        raise RankLostError(str(error)) from None
    finally:
        call.cancel()


async def _until_accepted(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse], timeout_s: float
) -> None:
    """Wait for the initial metadata, which a worker sends once the request is queued."""
    try:
        async with asyncio.timeout(timeout_s):
            metadata = await call.initial_metadata()
    except TimeoutError:
        raise RankLostError(
            f"it did not accept the request within {timeout_s:g} s (accept)"
        ) from None
    # A rank may accept a request and end its stream at once.
    if call.done() and ACCEPTED_KEY not in metadata:
        # The rank rejected it: reading raises the reason.
        await call.read()
        raise RankLostError("it ended the stream before the first token")


async def _next(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
    request: GenerateRequest,
    num_before: int,
    *,
    timeout_s: float,
    queue_timeout_s: float,
    vocab_size: int,
) -> GeneratedTokens:
    """The next tokens. Reports of waiting restart the timeout while the rank's steps advance."""
    now = asyncio.get_running_loop().time
    queued_until_s, latest = now() + queue_timeout_s, (0, 0)
    prompt: list[pb.PromptReport] = []
    num_unreported = request.num_prompt_logprobs
    try:
        async with asyncio.timeout(timeout_s) as bound:
            while True:
                response = await call.read()
                if not isinstance(response, pb.GenerateResponse):
                    raise RankLostError("it ended the stream without a finish reason")
                if response.HasField("prompt"):
                    num_unreported -= len(response.prompt.logprobs)
                    if num_unreported < 0 or not (response.prompt.logprobs or response.tokens):
                        raise RankLostError("it sent logprobs that the request did not ask for")
                    prompt.append(response.prompt)
                if response.tokens or response.finish_reason:
                    return response_from_proto(
                        response,
                        request=request,
                        num_before=num_before,
                        vocab_size=vocab_size,
                        prompt=prompt,
                    )
                if response.is_waiting and (response.epoch, response.step) > latest:
                    latest = (response.epoch, response.step)
                    bound.reschedule(min(now() + timeout_s, queued_until_s))
    except TimeoutError:
        if now() >= queued_until_s:
            raise QueuedTooLongError(
                f"the request waited for {queue_timeout_s:g} s in the queue of a rank (rank queue)"
            ) from None
        which = "silence" if num_before else "first token"
        raise RankLostError(f"it sent no token for {timeout_s:g} s ({which})") from None


def _failure(error: grpc.aio.AioRpcError, credentials: Credentials) -> Exception:
    details = credentials.explain(error.details())
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return RankFullError(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details)
        case grpc.StatusCode.OUT_OF_RANGE:
            return GrammarLimitError(details)
        case code:
            metadata: Any = error.trailing_metadata()
            return RankLostError(f"{code.name}: {details}", blame=blame_from_metadata(metadata))

"""`InferenceService`: clients' requests to the engine, and its tokens back to them.

Owns checking requests and the way of tokens from the engine's thread to each client's stream.
"""

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from equipoise.telemetry.histogram import Histogram
from equipoise.wire.inference import BLAME_KEY, Blame
from equipoise.worker.engine import Engine, StepResult
from equipoise.worker.errors import InvalidRequestError, QueueFullError, StepError
from equipoise.worker.sequence import Emission, FinishReason, Request
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc
from equipoise_model.sampling_params import SampledToken, SamplingError, SamplingParams

_log = logging.getLogger(__name__)

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.FAILED: pb.FINISH_REASON_UNSPECIFIED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    emission: Emission
    epoch: int
    step: int
    generation: int


class InferenceService(pb_grpc.InferenceServicer):
    """Serves `Generate`; used from the event loop only.

    `itl_s` counts the time from one token of a request to its next.

    `vocab_size` and `context_length` (prompt and output together) bound what a request may ask.
    """

    def __init__(self, *, vocab_size: int, context_length: int, itl_s: Histogram) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._engine: Engine | None = None
        self._closed = "this worker has no rank yet: try again when its health says SERVING"
        self._keys = itertools.count(1)
        self._itl_s = itl_s
        # What each open request has not sent yet. It holds at most the request's own tokens; None
        # ends it when the engine has ended.
        self._streams: dict[int, asyncio.Queue[_Token | None]] = {}
        self._draining = ""
        self._failed_step: StepError | None = None
        self._changed = asyncio.Event()

    def open(self, engine: Engine) -> None:
        """Serve by this engine; before the first one every request is turned away.

        Between two engines that share a scheduler, requests wait for the next one.
        """
        self._engine = engine

    def close(self, reason: str, *, failed_step: StepError | None = None) -> None:
        """End open requests and turn new ones away with UNAVAILABLE and this reason.

        The requests of a step that failed get the blame that it gives them.
        """
        self._engine, self._closed, self._failed_step = None, reason, failed_step
        for stream in self._streams.values():
            stream.put_nowait(None)
        self._note_change()

    @property
    def draining(self) -> bool:
        """Whether new requests are turned away because this worker stops."""
        return bool(self._draining)

    def turn_away(self, reason: str) -> None:
        """Answer new requests with UNAVAILABLE and this reason from now on; those here go on."""
        self._draining = reason

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until all requests here have ended or the service closed, at most `timeout_s`.

        False if some were left then.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._streams and self._engine is not None:
                    await self._changed.wait()
        return not self._streams or self._engine is None

    def deliver(self, result: StepResult) -> None:
        """Hand a step's tokens to their requests."""
        for emission in result.emissions:
            stream = self._streams.get(emission.key)
            if stream is not None:
                stream.put_nowait(
                    _Token(
                        emission=emission,
                        epoch=result.epoch,
                        step=result.step,
                        generation=result.generation,
                    )
                )

    # A coroutine that writes, not a generator: its clean-up runs the moment the client goes away.
    async def Generate(  # type: ignore[override]  # noqa: N802 - named by the contract
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        """Stream a request's tokens as steps make them."""
        try:
            check_request(request, vocab_size=self._vocab_size, context_length=self._context_length)
            sampling = sampling_params(request.sampling)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        engine = self._engine
        if engine is None or self._draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._draining or self._closed)
        assert engine is not None
        key = next(self._keys)
        stream: asyncio.Queue[_Token | None] = asyncio.Queue()
        self._streams[key] = stream
        try:
            engine.submit(
                Request(
                    key=key,
                    prompt=tuple(request.prompt),
                    max_tokens=request.max_tokens,
                    stop_tokens=frozenset(request.stop_tokens),
                    sampling=sampling,
                    num_replayed=request.num_replayed,
                )
            )
            # Tells the client at once that its request stands in line: what breaks from here on
            # has broken under it.
            await context.send_initial_metadata(())
            finished, last_s = False, 0.0
            with_logprobs = sampling.logprobs is not None
            while not finished:
                tokens = await _all_waiting(stream)
                if tokens and (fault := tokens[-1].emission.sampled.fault):
                    if tokens[:-1]:
                        await context.write(_response(tokens[:-1], with_logprobs=with_logprobs))
                    words = f"the request failed in step {tokens[-1].step}: {fault}"
                    _log.warning("%s: %s", request.request_id, words)
                    await _end(context, grpc.StatusCode.INTERNAL, words, blame=Blame.REQUEST)
                elif tokens:
                    now = time.perf_counter()
                    if last_s:
                        self._itl_s.observe((now - last_s) / len(tokens))
                    last_s = now
                    await context.write(_response(tokens, with_logprobs=with_logprobs))
                    finished = tokens[-1].emission.finish is not None
                else:
                    blame = self._blame(key)
                    await _end(context, grpc.StatusCode.UNAVAILABLE, self._closed, blame=blame)
        except QueueFullError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            # Also when the client went away: its blocks are wanted by others.
            del self._streams[key]
            (self._engine or engine).cancel(key)
            self._note_change()

    def _blame(self, key: int) -> Blame:
        """How far a request is the cause that the engine has ended."""
        step = self._failed_step
        return step.blame if step is not None and key in step.keys else Blame.NONE

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _end(
    context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    code: grpc.StatusCode,
    words: str,
    *,
    blame: Blame,
) -> NoReturn:
    await context.abort(code, words, trailing_metadata=((BLAME_KEY, blame.value),))


def check_request(request: pb.GenerateRequest, *, vocab_size: int, context_length: int) -> None:
    """See that a request can be served at all.

    Raises:
        InvalidRequestError: it cannot; names the limit.
    """
    if not request.prompt:
        raise InvalidRequestError("the prompt is empty: send at least one token")
    if request.max_tokens < 1:
        raise InvalidRequestError("max_tokens is 0: ask for at least one token")
    total = len(request.prompt) + request.max_tokens
    if total > context_length:
        raise InvalidRequestError(
            f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} make "
            f"{total}, and this worker's context is {context_length} tokens"
        )
    if request.num_replayed >= len(request.prompt):
        raise InvalidRequestError(
            f"num_replayed is {request.num_replayed}, but the {len(request.prompt)} tokens of the "
            f"prompt must begin with one that was asked"
        )
    for token in itertools.chain(request.prompt, request.stop_tokens):
        if token >= vocab_size:
            raise InvalidRequestError(
                f"token {token} is out of the vocabulary: tokens are 0 to {vocab_size - 1}"
            )


def sampling_params(sampling: pb.Sampling) -> SamplingParams:
    """How a request's tokens are chosen.

    Raises:
        InvalidRequestError: a value is out of range; names the field.
    """
    # What is not set has the default of the model's own type.
    unset = {n for n in ("top_p", "repetition_penalty", "logprobs") if not sampling.HasField(n)}
    names = (field.name for field in pb.Sampling.DESCRIPTOR.fields)
    given: dict[str, Any] = {name: getattr(sampling, name) for name in names if name not in unset}
    try:
        return SamplingParams(**given)
    except SamplingError as error:
        raise InvalidRequestError(f"sampling.{error}") from None


async def _all_waiting(stream: asyncio.Queue[_Token | None]) -> list[_Token]:
    """Wait for a token and take all that wait by now; empty when the engine has ended."""
    token = await stream.get()
    tokens = []
    while token is not None:
        tokens.append(token)
        if stream.empty():
            return tokens
        token = stream.get_nowait()
    if tokens:
        stream.put_nowait(None)
    return tokens


def _response(tokens: list[_Token], *, with_logprobs: bool) -> pb.GenerateResponse:
    last = tokens[-1]
    sampled = [token.emission.sampled for token in tokens]
    return pb.GenerateResponse(
        tokens=[one.token for one in sampled],
        finish_reason=_FINISH[last.emission.finish],
        generation=last.generation,
        step=last.step,
        epoch=last.epoch,
        logprobs=[_logprob(one) for one in sampled] if with_logprobs else (),
    )


def _logprob(sampled: SampledToken) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        logprob=sampled.logprob,
        top_tokens=[token for token, _ in sampled.top],
        top_logprobs=[logprob for _, logprob in sampled.top],
    )

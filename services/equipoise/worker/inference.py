"""`InferenceService`: clients' requests to the engine, and its tokens to their streams."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import NoReturn

import grpc

from equipoise.telemetry.histogram import Histogram
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference import request_from_proto, response_to_proto, waiting_to_proto
from equipoise.wire.inference_messages import (
    ACCEPTED_KEY,
    BLAME_KEY,
    Blame,
    GeneratedTokens,
    GenerateRequest,
    Grammar,
    LatentHold,
    PromptReport,
    TokenLogprob,
)
from equipoise.worker.engine import Engine, StepResult, Visited
from equipoise.worker.errors import NotServingError, QueueFullError, StepError
from equipoise.worker.grammar_compiler import GrammarCompiler
from equipoise.worker.grammars import Constraint, GrammarError, GrammarLimitError
from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.latents.puller import LatentPuller
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Emission, Request
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc
from equipoise_model.sampling_params import SampledToken, SamplingError, SamplingParams

_Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
_LimitsContext = grpc.aio.ServicerContext[pb.GetLimitsRequest, pb.GetLimitsResponse]
_Token = tuple[StepResult, Emission]
_Stream = asyncio.Queue[_Token | None]

WAITING_REPORT_S = 1.0
"""How often a worker reports that a request waits for its turn, seconds."""

_log = logging.getLogger(__name__)


class InferenceService(pb_grpc.InferenceServicer):
    """Serves `Generate`; used from the event loop only.

    `grammars` compiles what outputs must match; without it such requests are rejected.
    `vocab_size` and `context_length` (prompt and output together) limit what a request may ask for.
    `itl_s` counts the time between two tokens of a request, seconds. `boot_id` is this process;
    `latents` fetches what another pool has prefilled of a prompt.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        itl_s: Histogram,
        boot_id: str,
        latents: LatentPuller,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._grammars = grammars
        self._boot_id = boot_id
        self._latents = latents
        self._vocab_size = vocab_size
        self._context_length = context_length
        # The newest engine, which has the requests of earlier ones too, even when closed.
        self._engine: Engine | None = None
        # Why requests are rejected; empty while the engine takes them.
        self._closed = "this worker has no rank yet: try again when its health is SERVING"
        self._keys = itertools.count(1)
        self._itl_s = itl_s
        # Tokens not sent yet, by request: at most the request's own. None ends the stream when the
        # engine has ended.
        self._streams: dict[int, _Stream] = {}
        self.draining = ""
        """Rejects new requests with UNAVAILABLE and this reason if set; open ones continue."""
        self._failed_step: StepError | None = None
        self._changed = asyncio.Event()

    async def prepare(self) -> None:
        """Load what grammars need; better than with the first one, while others are served."""
        if self._grammars is not None:
            await self._grammars.load()

    def visit(self, act: Callable[[Scheduler], Visited]) -> Visited:
        """Let `act` use the scheduler; once an engine was opened, also between two engines.

        Raises:
            NotServingError: no engine was opened yet.
        """
        if self._engine is None:
            raise NotServingError(self._closed)
        return self._engine.visit(act)

    def open(self, engine: Engine) -> None:
        """Serve by this engine; before the first one every request is rejected.

        Requests stay open between two engines that share a scheduler.
        """
        self._engine, self._closed = engine, ""

    def close(self, reason: str, *, failed_step: StepError | None = None) -> None:
        """End open requests and reject new ones with UNAVAILABLE and this reason.

        The requests of a failed step get its blame.
        """
        self._closed, self._failed_step = reason, failed_step
        if self._grammars is not None:
            self._grammars.close()
        for stream in self._streams.values():
            stream.put_nowait(None)
        self._changed.set()

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until all requests have ended or the service is closed.

        Returns False if some are open after `timeout_s` seconds.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._streams and not self._closed:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._streams or bool(self._closed)

    def deliver(self, result: StepResult) -> None:
        """Pass a step's tokens to their requests."""
        for emission in result.emissions:
            stream = self._streams.get(emission.key)
            if stream is not None:
                stream.put_nowait((result, emission))
            elif emission.hold:
                self._release(emission.hold)

    def _release(self, hold: int) -> None:
        """End a hold that nobody will hear of, because the client is gone."""
        self.visit(lambda scheduler: scheduler.holds.end(hold, HoldEnd.RELEASED))

    # A coroutine that writes, not a generator: its cleanup runs as soon as the client is gone.
    async def Generate(  # type: ignore[override]  # noqa: N802 - named by the contract
        self, message: pb.GenerateRequest, context: _Context
    ) -> None:
        """Stream a request's tokens as steps generate them."""
        key = next(self._keys)
        try:
            request = request_from_proto(
                message, vocab_size=self._vocab_size, context_length=self._context_length
            )
            queued = _queued(request, key)
        except InvalidMessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SamplingError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"sampling.{error}")
        if self._closed or self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.draining or self._closed)
        assert self._engine is not None, "a service without an engine is closed"
        stream = self._streams[key] = _Stream()
        try:
            await self._run(context, request, stream, queued)
        except QueueFullError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except GrammarLimitError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"grammar: {error}")
        except GrammarError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"grammar: {error}")
        finally:
            # Also when the client is gone: others need its blocks. Only the newest engine's lock
            # keeps its thread from the scheduler.
            del self._streams[key]
            self._engine.cancel(key)
            self._changed.set()
            while not stream.empty():
                token = stream.get_nowait()
                if token is not None and token[1].hold:
                    self._release(token[1].hold)

    async def GetLimits(  # noqa: N802 - named by the contract
        self, _: pb.GetLimitsRequest, context: _LimitsContext
    ) -> pb.GetLimitsResponse:
        """Report the limits of requests, unless all are rejected now."""
        if self._closed or self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.draining or self._closed)
        return pb.GetLimitsResponse(context_length=self._context_length)

    async def _run(
        self, context: _Context, request: GenerateRequest, stream: _Stream, queued: Request
    ) -> None:
        """Accept a request, queue it, and send its tokens."""
        self.visit(lambda scheduler: scheduler.check_room())
        # Reports that the rank works on it: later failures count as failures of this request.
        await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        if request.grammar is not None:
            queued = replace(queued, constraint=await self._constraint(request, request.grammar))
        assert self._engine is not None
        # Perhaps not the engine from before.
        self._engine.submit(queued)
        if request.latents_from is None:
            return await self._write(context, request, stream, queued)
        pull = self._latents.pull(queued.key, request.latents_from, visit=self.visit)
        pulling = asyncio.create_task(pull)
        try:
            return await self._write(context, request, stream, queued)
        finally:
            pulling.cancel()

    async def _constraint(self, request: GenerateRequest, grammar: Grammar) -> Constraint:
        """Which tokens the request's output may have, after those of other ranks."""
        if self._grammars is None:
            raise GrammarError("this worker takes no grammars")
        output = request.prompt[len(request.prompt) - request.num_replayed :]
        return await self._grammars.constraint(
            grammar, output=output, stop_tokens=request.stop_tokens
        )

    async def _write(
        self, context: _Context, request: GenerateRequest, stream: _Stream, queued: Request
    ) -> None:
        """Send tokens up to the finish, or end the stream with the reason."""
        key, last_s = queued.key, 0.0
        while True:
            try:
                async with asyncio.timeout(WAITING_REPORT_S):
                    tokens = await _all_queued(stream)
            except TimeoutError:
                await self._report_waiting(context, key)
                continue
            if not tokens:
                await _end(
                    context, grpc.StatusCode.UNAVAILABLE, self._closed, blame=self._blame(key)
                )
            result, last = tokens[-1]
            if last.sampled.fault:
                tokens.pop()
            if tokens:
                now = time.perf_counter()
                if last_s:
                    self._itl_s.observe((now - last_s) / len(tokens))
                last_s = now
                # If this is cancelled the hold stays: the client may have read the message, as a
                # gateway has that ends a first leg to have another rank fetch the latents.
                for message in _responses(tokens, request, boot_id=self._boot_id):
                    await context.write(message)
            if last.sampled.fault:
                reason = f"the request failed in step {result.step}: {last.sampled.fault}"
                await _end_faulty(context, request, queued, reason)
            if last.finish is not None:
                return

    async def _report_waiting(self, context: _Context, key: int) -> None:
        assert self._engine is not None
        latest = self._engine.latest_step_if_waiting(key)
        if latest is not None:
            epoch, step = latest
            await context.write(waiting_to_proto(epoch=epoch, step=step))

    def _blame(self, key: int) -> Blame:
        """How far a request is the cause of the engine's end."""
        step = self._failed_step
        return step.blame if step is not None and key in step.keys else Blame.NONE


def _queued(request: GenerateRequest, key: int) -> Request:
    """The request as the engine takes it, without what it must match.

    Raises:
        SamplingError: a sampling parameter is out of range.
    """
    return Request(
        key=key,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        stop_tokens=request.stop_tokens,
        sampling=SamplingParams(**asdict(request.sampling), logit_bias=request.logit_bias),
        num_replayed=request.num_replayed,
        prompt_logprobs=request.prompt_logprobs,
        min_tokens=request.min_tokens,
        hold_latents=request.hold_latents,
        is_handed_over=request.latents_from is not None,
    )


async def _end(context: _Context, code: grpc.StatusCode, reason: str, *, blame: Blame) -> NoReturn:
    await context.abort(code, reason, trailing_metadata=((BLAME_KEY, blame.value),))


async def _end_faulty(
    context: _Context, request: GenerateRequest, queued: Request, reason: str
) -> NoReturn:
    """End the stream of a request for which no token could be sampled."""
    if queued.constraint is not None and queued.constraint.trouble:
        reason = f"grammar: too complex after this output: {queued.constraint.trouble}"
        await _end(context, grpc.StatusCode.OUT_OF_RANGE, reason, blame=Blame.REQUEST)
    _log.warning("%s: %s", request.request_id, reason)
    await _end(context, grpc.StatusCode.INTERNAL, reason, blame=Blame.REQUEST)


async def _all_queued(stream: _Stream) -> list[_Token]:
    """Wait for a token and take all that are queued; empty when the engine has ended."""
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


def _responses(
    tokens: list[_Token], request: GenerateRequest, *, boot_id: str
) -> list[pb.GenerateResponse]:
    (_, first), (result, last) = tokens[0], tokens[-1]
    report = None
    if first.prompt is not None:
        logprobs = tuple(map(_logprob, first.prompt.scores))
        report = PromptReport(num_cached=first.prompt.num_cached, logprobs=logprobs)
    sampled = [emission.sampled for _, emission in tokens]
    with_logprobs = request.sampling.logprobs is not None
    return response_to_proto(
        GeneratedTokens(
            tokens=tuple(one.token for one in sampled),
            finish=last.finish,
            logprobs=tuple(_logprob(one) for one in sampled if with_logprobs),
            prompt=report,
            held=(
                LatentHold(boot_id=boot_id, hold=last.hold, num_tokens=last.num_held_tokens)
                if last.hold
                else None
            ),
        ),
        generation=result.generation,
        step=result.step,
        epoch=result.epoch,
    )


def _logprob(sampled: SampledToken) -> TokenLogprob:
    return TokenLogprob(value=sampled.logprob, top=sampled.top)

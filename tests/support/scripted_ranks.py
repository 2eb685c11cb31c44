"""Scripted ranks behind real gRPC, and clients of the gateway in front of them."""

import asyncio
import hashlib
import json
import ssl
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from equipoise.wire.inference_messages import ACCEPTED_KEY, BLAME_KEY, Blame
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc

BOUND_S = 120.0
VOCAB_SIZE = 272
END_TOKEN = 257

TRUSTING_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP, which read the certificates of all authorities otherwise: 40 ms."""


def undisturbed(prompt, max_tokens, stop_tokens=()):
    """What ranks make of a prompt: each token depends on all before it, and is printable."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        token = 33 + hashlib.blake2b(repr(context).encode()).digest()[0] % 90
        context.append(token)
        if token in stop_tokens:
            break
    return tuple(context[len(prompt) :])


def told_logprobs(request, tokens):
    """The log-probability that ranks report: a function of the token alone."""
    if not request.sampling.HasField("logprobs"):
        return []
    return logprobs_of(tokens, request.sampling.logprobs)


def logprobs_of(tokens, num_top):
    return [
        pb.TokenLogprob(
            logprob=-token / 64,
            top_tokens=range(token, token + num_top),
            top_logprobs=[-token / 64 - place for place in range(num_top)],
        )
        for token in tokens
    ]


def prompt_reports(request, num_cached):
    """What ranks report of a prompt, in parts of up to two logprobs."""
    end = len(request.prompt) - request.num_replayed
    scored = request.prompt[1:end] if request.HasField("prompt_logprobs") else []
    return [
        pb.PromptReport(
            cached_tokens=num_cached,
            logprobs=logprobs_of(scored[start : start + 2], request.prompt_logprobs),
        )
        for start in range(0, max(1, len(scored)), 2)
    ]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How a rank fails one request, after `after` right tokens."""

    after: int = 0
    code: grpc.StatusCode | None = None
    """Ends the call with this."""
    hang: bool = False
    """Says nothing more."""
    accept: bool = True
    """Takes the request before it fails."""
    also: tuple[pb.GenerateResponse, ...] = ()
    """Says this, and then ends the call as if all were well."""
    blame: Blame | None = None
    """Says with `code` how far the request is the cause; a rank that dies says nothing."""
    words: str = "as the script says"
    """Details of the code."""


def says(text):
    """A fault by which a rank generates this text, a byte at a time, and ends it."""
    tokens = [*text.encode(), END_TOKEN]
    return Fault(
        also=tuple(
            pb.GenerateResponse(
                tokens=[token], finish_reason=pb.FINISH_REASON_STOP if token == END_TOKEN else 0
            )
            for token in tokens
        )
    )


class FakeRank(worker_pb2_grpc.InferenceServicer, worker_pb2_grpc.LatentTransferServicer):
    """Serves requests, except for its scripted faults, one per request, in turn."""

    def __init__(self):
        self.faults = deque()
        self.requests = []
        self.num_open = 0
        self.changed = asyncio.Condition()
        self.gate = asyncio.Event()
        self.gate.set()
        self.tokens_a_message = 1
        self.waits_s = []
        """Pauses before a token, after each of which it reports that the request waits."""
        self.waits_after = 0
        """Tokens before these pauses."""
        self.context_length = 256
        self.num_cached = 0
        self.poison = None
        self.num_deaths = 0
        self.num_holds = 0
        self.released = []
        self._serving = set()

    async def Generate(self, request, context):  # noqa: N802 - named by the contract
        fault = self.faults.popleft() if self.faults else None
        self.requests.append(request)
        await self._count(+1)
        serving = asyncio.ensure_future(self._serve(request, context, fault))
        self._serving.add(serving)
        try:
            await asyncio.wait({serving})
            if serving.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the rank died")
            serving.result()
        finally:
            serving.cancel()
            self._serving.discard(serving)
            await self._count(-1)

    async def GetLimits(self, _request, _context):  # noqa: N802 - named by the contract
        return pb.GetLimitsResponse(context_length=self.context_length)

    def _held(self, request):
        if not request.hold_latents:
            return None
        self.num_holds += 1
        return pb.LatentHold(boot_id="boot", hold=self.num_holds, num_tokens=16)

    async def Release(self, request, _context):  # noqa: N802 - named by the contract
        self.released.append(request.hold)
        return pb.LatentTransferReleaseResponse()

    async def until(self, condition):
        async with asyncio.timeout(BOUND_S), self.changed:
            await self.changed.wait_for(condition)

    async def _serve(self, request, context, fault):
        if fault is None or fault.accept:
            await _accept(context, fault)
        if self.poison:
            await self._die_of_poison(request)
        num_tokens = request.max_tokens if fault is None else min(request.max_tokens, fault.after)
        tokens = undisturbed(request.prompt, num_tokens, request.stop_tokens)
        stopped = tokens[-1:] and tokens[-1] in request.stop_tokens
        finish = pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH
        size = self.tokens_a_message
        *early, report = prompt_reports(request, self.num_cached)
        for part in early:
            await _finished(context.write(pb.GenerateResponse(prompt=part)))
        for start in range(0, len(tokens), size):
            await self.gate.wait()
            if start == self.waits_after:
                await self._report_waiting(context)
            some = tokens[start : start + size]
            is_last = fault is None and start + size >= len(tokens)
            await _finished(
                context.write(
                    pb.GenerateResponse(
                        tokens=some,
                        finish_reason=finish if is_last else 0,
                        logprobs=told_logprobs(request, some),
                        prompt=None if start else report,
                        held=self._held(request) if is_last else None,
                    )
                )
            )
        if fault is None:
            return
        for message in fault.also:
            await context.write(message)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.code is not None:
            blame = () if fault.blame is None else ((BLAME_KEY, fault.blame.value),)
            await context.abort(fault.code, fault.words, trailing_metadata=blame)

    async def _die_of_poison(self, request):
        await asyncio.sleep(0.05)
        if tuple(request.prompt) == self.poison:
            self.num_deaths += 1
            for serving in self._serving:
                serving.cancel()
        await asyncio.sleep(0)

    async def _report_waiting(self, context):
        for step, wait_s in enumerate(self.waits_s, start=1):
            await asyncio.sleep(wait_s)
            await context.write(pb.GenerateResponse(epoch=1, step=step, is_waiting=True))

    async def _count(self, change):
        async with self.changed:
            self.num_open += change
            self.changed.notify_all()


async def _accept(context, fault):
    await _finished(context.send_initial_metadata(((ACCEPTED_KEY, "1"),)))
    if fault is not None and fault.code is not None:
        # The end of a call may overtake its initial metadata, but not a message: without one, the
        # gateway may take a request for one that was not accepted.
        await _finished(context.write(pb.GenerateResponse(epoch=1, step=1, is_waiting=True)))


async def _finished(send):
    """Finish a message even if the rank dies meanwhile: gRPC cannot end a stream amid one."""
    sending = asyncio.ensure_future(send)
    try:
        await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.wait({sending})
        raise


@asynccontextmanager
async def listening(rank, address="127.0.0.1:0"):
    """The rank behind a port; gives its address."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    worker_pb2_grpc.add_InferenceServicer_to_server(rank, server)
    worker_pb2_grpc.add_LatentTransferServicer_to_server(rank, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Fleet:
    def __init__(self, ranks, addresses):
        self.ranks, self.addresses = ranks, addresses

    def fail(self, *faults):
        """Every rank has these faults, so that a request meets them wherever it goes."""
        for rank in self.ranks:
            rank.faults.extend(faults)

    async def until_open(self):
        """Wait until a rank serves a request."""
        waits = [
            asyncio.create_task(rank.until(lambda rank=rank: rank.num_open > 0))
            for rank in self.ranks
        ]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        for wait in done:
            wait.result()

    async def until_idle(self):
        """Wait until no rank serves any."""
        for rank in self.ranks:
            await rank.until(lambda rank=rank: rank.num_open == 0)

    @property
    def num_requests(self):
        return sum(len(rank.requests) for rank in self.ranks)


class Gateway:
    """A gateway that serves, and one of its clients."""

    def __init__(self, client, stop, task):
        self.client, self.stop, self.task = client, stop, task

    async def post(self, **fields):
        return await self.client.post("/v1/completions", json=fields)

    @asynccontextmanager
    async def stream(self, **fields):
        body = {"stream": True, "return_token_ids": True, **fields}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            yield response


async def events(response):
    """The data of a stream's events as they come."""
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


async def all_events(response):
    return [event async for event in events(response)]


def tokens_of(chunks):
    """Tokens of a whole stream, which must have ended well."""
    assert chunks[-1] == "[DONE]", chunks[-1]
    parts = [json.loads(data) for data in chunks[:-1]]
    return tuple(
        token
        for part in parts
        for choice in part["choices"]
        for token in choice.get("token_ids", ())
    )

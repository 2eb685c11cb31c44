"""`Relay`: stands in front of a gRPC server and passes or disturbs messages.

Messages pass as bytes, whatever service they belong to, so that it serves both sides of every
contract. It looks at two of them only: which worker says Hello, to give its link weather of its
own, and which tokens a rank generated in which step, for the history.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import grpc
from google.protobuf.message import DecodeError

from equipoise.trust.credentials import ACCEPTED_PINGS
from equipoise_api.v1 import worker_link_pb2, worker_pb2

_CONNECT = "/equipoise_api.v1.WorkerLink/Connect"
GENERATE = "/equipoise_api.v1.Inference/Generate"
_FETCH = "/equipoise_api.v1.ExpertTransfer/Fetch"
LATENTS = "/equipoise_api.v1.LatentTransfer/Fetch"

PROMPT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
)
"""Options of a channel whose target, when it was restarted, is to be reached at once."""

_POLL_S = 0.02

Observer = Callable[[worker_pb2.GenerateResponse], None]


class GatePasses(Protocol):
    """Waits until a message of a call may pass; its number is -1 at the end of a direction."""

    async def __call__(self, method: str, *, upwards: bool, number: int) -> None:
        """Return when it may."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """Faults of a link's messages; probabilities are per message and direction.

    `parted` holds back everything until it is over, as a network does whose packets are lost and
    sent again. Corruption of experts is of each piece of one, and so are faults of latents.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    parted: bool = False
    dropped: float = 0.0
    doubled: float = 0.0
    swapped: float = 0.0
    garbled: float = 0.0
    delay_s: float = 0.0
    corrupted: float = 0.0
    stalled: bool = False
    latents_corrupted: float = 0.0
    latents_stalled: bool = False
    latents_cut: float = 0.0

    def disturb(self, message: bytes, *, garbling: bool) -> list[bytes]:
        """What becomes of a message by itself: nothing, another, itself, or itself twice."""
        if self.rng.random() < self.dropped:
            return []
        if garbling and self.rng.random() < self.garbled:
            message = _garbled(message, self.rng)
        return [message] * (2 if self.rng.random() < self.doubled else 1)


class Relay:
    """Serves `listen` (host:port) with what `target` answers. An asynchronous context."""

    def __init__(self, listen: str, *, target: str, observer: Observer | None = None) -> None:
        self.listen = listen
        self.weather = Weather()
        self.weather_of: dict[str, Weather] = {}
        self.num_fetching = 0
        """Fetches of latents that run."""
        self.num_latents = 0
        """Messages with latents that have passed."""
        self.gate: GatePasses | None = None
        """What each message waits for, whatever the weather."""
        self._target = target
        self._observer = observer
        self._calls: dict[asyncio.Task[Any], str] = {}
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *ACCEPTED_PINGS))
        self._server.add_generic_rpc_handlers((_Everything(self._relay),))

    async def __aenter__(self) -> Self:
        assert self._server.add_insecure_port(self.listen), self.listen
        self._channel = grpc.aio.insecure_channel(self._target, options=PROMPT)
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def cut(self, worker: str = "") -> None:
        """Break all calls that run, or those of one worker's link."""
        for task, name in list(self._calls.items()):
            if not worker or name == worker:
                task.cancel()

    def clear(self) -> None:
        """End all bad weather."""
        self.weather = Weather()
        self.weather_of.clear()

    async def _relay(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        call = self._channel.stream_stream(method)(metadata=_forwarded(context))
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = ""
        self.num_fetching += method == LATENTS
        sender = asyncio.create_task(self._send(method, requests, call, task))
        try:
            await self._answer(method, call, context, task)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        except asyncio.CancelledError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was cut")
        finally:
            del self._calls[task]
            self.num_fetching -= method == LATENTS
            sender.cancel()
            call.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await sender

    async def _send(
        self, method: str, requests: AsyncIterator[bytes], call: Any, task: asyncio.Task[Any]
    ) -> None:
        first = True
        with suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
            async for message in self._through(method, requests, task, upwards=True):
                if first and method == _CONNECT:
                    self._calls[task] = _worker_of(message)
                first = False
                await call.write(message)
            await call.done_writing()

    async def _answer(self, method: str, call: Any, context: Any, task: asyncio.Task[Any]) -> None:
        # A rank says with its metadata that it took a request, long before its first token.
        await context.send_initial_metadata(tuple(await call.initial_metadata() or ()))
        async for message in self._through(method, _read(call), task):
            if method == GENERATE and self._observer is not None:
                self._observer(worker_pb2.GenerateResponse.FromString(message))
            if method == _FETCH:
                message = await self._transferred(message)  # noqa: PLW2901
            if method == LATENTS:
                message = await self._fetched(message, context)  # noqa: PLW2901
            await context.write(message)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            await context.abort(code, await call.details(), await call.trailing_metadata() or ())

    async def _through(
        self,
        method: str,
        messages: AsyncIterator[bytes],
        task: asyncio.Task[Any],
        *,
        upwards: bool = False,
    ) -> AsyncIterator[bytes]:
        """What the weather leaves of the messages of one direction of a call.

        Only what goes up is garbled: the balancer distrusts what it hears. Workers believe a
        balancer whose messages arrived whole, as TCP and TLS see to. Other calls than the worker
        link know the weather of transfers only, and cuts.
        """
        kept: bytes | None = None
        number = 0
        async for message in messages:
            weather = await self._clear_enough(task)
            if method != _CONNECT:
                await self._pass_gate(method, upwards=upwards, number=number)
                number += 1
                yield message
                continue
            if weather.delay_s:
                await asyncio.sleep(weather.rng.uniform(0, weather.delay_s))
            passing = weather.disturb(message, garbling=upwards)
            if passing and kept is None and weather.rng.random() < weather.swapped:
                kept = passing.pop()
            for one in passing:
                yield one
            if passing and kept is not None:
                yield kept
                kept = None
        if kept is not None:
            yield kept
        await self._pass_gate(method, upwards=upwards, number=-1)

    async def _pass_gate(self, method: str, *, upwards: bool, number: int) -> None:
        if self.gate is not None:
            await self.gate(method, upwards=upwards, number=number)

    async def _clear_enough(self, task: asyncio.Task[Any]) -> Weather:
        """The weather of a call's link, once it lets anything pass at all."""
        while True:
            weather = self.weather_of.get(self._calls.get(task, ""), self.weather)
            if not weather.parted:
                return weather
            await asyncio.sleep(_POLL_S)

    async def _transferred(self, message: bytes) -> bytes:
        while self.weather.stalled:  # noqa: ASYNC110 - the weather is plain data
            await asyncio.sleep(_POLL_S)
        if self.weather.rng.random() >= self.weather.corrupted:
            return message
        piece = worker_pb2.FetchResponse.FromString(message)
        piece.data = self._with_a_flipped_bit(piece.data)
        return piece.SerializeToString()

    async def _fetched(self, message: bytes, context: Any) -> bytes:
        """What becomes of a message with latents."""
        while self.weather.latents_stalled:  # noqa: ASYNC110 - the weather is plain data
            await asyncio.sleep(_POLL_S)
        if self.weather.rng.random() < self.weather.latents_cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the fetch was cut")
        self.num_latents += 1
        if self.weather.rng.random() >= self.weather.latents_corrupted:
            return message
        piece = worker_pb2.LatentTransferFetchResponse.FromString(message)
        piece.data = self._with_a_flipped_bit(piece.data)
        return piece.SerializeToString()

    def _with_a_flipped_bit(self, data: bytes) -> bytes:
        changed, rng = bytearray(data), self.weather.rng
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)


@asynccontextmanager
async def forwarding(listen: str, *, target: str) -> AsyncIterator[None]:
    """Pass the bytes of every connection on, both ways; for what is not gRPC."""
    host, _, port = target.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            upper_reader, upper_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pass(reader, upper_writer), _pass(upper_reader, writer))
        writer.close()

    host_here, _, port_here = listen.rpartition(":")
    async with await asyncio.start_server(connected, host_here, int(port_here)):
        yield


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


class _Everything(grpc.GenericRpcHandler):
    """Every method, as a stream of bytes each way, which on the wire it is."""

    def __init__(self, relay: Callable[..., Any]) -> None:
        self._relay = relay

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._relay(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(serve)


async def _read(call: Any) -> AsyncIterator[bytes]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


def _worker_of(message: bytes) -> str:
    try:
        return worker_link_pb2.ConnectRequest.FromString(message).hello.worker
    except DecodeError:
        return ""


def _forwarded(context: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if not key.startswith(("grpc-", "user-agent", ":"))
    )


def _garbled(message: bytes, rng: random.Random) -> bytes:
    data = bytearray(message) or bytearray(b"\0")
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)

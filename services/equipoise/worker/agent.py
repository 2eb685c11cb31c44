"""`Agent`: keeps a stream to the balancer that leads, for as long as the worker lives.

Owns finding the leader, connecting, liveness and back-off. What messages mean is decided by whom it
is given; nothing here ever holds up serving.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc

from equipoise.planning.layout import Layout
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import (
    Abort,
    BalancerMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    JoinEpoch,
    Leaving,
    Rejection,
    Report,
    Stage,
    Wait,
    WorkerMessage,
)
from equipoise.worker.errors import LinkLostError, NotLeadingError
from equipoise.worker.waits import ACK_TIMEOUT_S, Waits
from equipoise_api.v1 import worker_link_pb2 as pb
from equipoise_api.v1 import worker_link_pb2_grpc as pb_grpc

Call = grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]

_OUTBOX_LENGTH = 256
_NOT_LEADING_BACKOFF_S = 2.0
"""Longest wait while balancers answer, but none of them leads yet: that ends within seconds."""

_REPORT_MAY_BE_LATE = 1.1
"""Intervals from a heartbeat that went with a report to one by itself: by default the next report
is due at the same moment, and takes it along."""

_CHANNEL_OPTIONS = (
    # A subchannel shared with an earlier attempt would sit out that one's back-off.
    ("grpc.use_local_subchannel_pool", 1),
)

_log = logging.getLogger(__name__)


class Agent:
    """The worker's end of the stream; used from the event loop only.

    `addresses` are those of all balancers. One that does not lead says who does; one that cannot be
    reached is followed by the next. What a balancer of a lower term than was heard of before sends
    is dropped: it has lost its leadership and does not know yet.

    `hello` and `heartbeat(sequence)` say what the worker is and does at that moment. `receive`
    gets every valid message but acknowledgements, `dropped` an invalid one with the reason;
    both must not block. `running` gives the layout that runs, of which changes may be told. A
    balancer that says nothing for `ack_timeout_s`, although every heartbeat asks for an answer,
    is taken for lost. Between two attempts the agent waits a random time ("full jitter") below
    a bound that doubles from `backoff_s` to `max_backoff_s`.
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        hello: Callable[[], Hello],
        heartbeat: Callable[[int], Heartbeat],
        receive: Callable[[BalancerMessage], None],
        dropped: Callable[[pb.ConnectResponse, str], None],
        running: Callable[[], Layout | None] = lambda: None,
        credentials: Credentials | None = None,
        waits: Waits | None = None,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        backoff_s: float = 0.2,
        max_backoff_s: float = 5.0,
    ) -> None:
        self.heartbeat_interval_s = 1.0
        self._addresses = tuple(addresses)
        self._address = self._addresses[0]
        self._hello = hello
        self._heartbeat = heartbeat
        self._receive = receive
        self._dropped = dropped
        self._running = running
        self._credentials = credentials or Credentials()
        self._waits = waits or Waits()
        self._ack_timeout_s = ack_timeout_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._random = random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._outbox: asyncio.Queue[WorkerMessage] | None = None
        self._heard_at = 0.0
        self._failures = 0
        self._highest_term = 0
        self._said: dict[str, str] = {}
        self._leaving = False
        self._ended = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether a stream is open and the balancer has answered on it."""
        return self._outbox is not None and self._failures == 0

    def send(self, message: WorkerMessage) -> None:
        """Tell the balancer, if a stream is open; the next Hello tells the state anyway."""
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            # The balancer has not read for long, and the liveness check is about to say so.
            _log.warning("the balancer does not read: a %s is dropped", type(message).__name__)

    async def run(self) -> None:
        """Connect, and connect again, until cancelled or left."""
        while not self._leaving:
            longest_s, leader = self._max_backoff_s, None
            try:
                await self._connect()
            except NotLeadingError as answer:
                longest_s, leader = min(longest_s, _NOT_LEADING_BACKOFF_S), answer.leader_address
                self._say(f"sent on by {self._address}: {answer}", level=logging.INFO)
            except LinkLostError as lost:
                if not self._leaving:
                    self._say(
                        f"no link to the balancer at {self._address}: {lost}; trying on",
                        level=logging.WARNING,
                    )
            self._failures += 1
            self._address = leader or self._next_address()
            rounds = min(16, -(-self._failures // len(self._addresses)))
            bound_s = min(longest_s, self._backoff_s * 2**rounds)
            await asyncio.sleep(self._random.uniform(0, bound_s))

    async def leave(self, reason: str, *, timeout_s: float = 2.0) -> None:
        """Announce a wilful stop, if there is a stream to say it on, and connect no more.

        Waits at most `timeout_s` for the balancer to close the stream.
        """
        self._leaving = True
        if self._outbox is None:
            return
        self.send(Leaving(reason=reason))
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("the balancer did not take the goodbye in %g s", timeout_s)

    async def _connect(self) -> None:
        """One stream from Hello to its end."""
        try:
            opened = self._credentials.balancer_channel(self._address, options=_CHANNEL_OPTIONS)
        except TrustError as error:
            raise LinkLostError(str(error)) from error
        async with opened as channel:
            call: Call = pb_grpc.WorkerLinkStub(channel).Connect(
                None, metadata=self._credentials.metadata()
            )
            hello = replace(self._hello(), highest_term=self._highest_term)
            self._outbox = asyncio.Queue(_OUTBOX_LENGTH)
            self._outbox.put_nowait(hello)
            self._ended.clear()
            self._heard_at = _now()
            ends = [
                asyncio.create_task(self._read(call, hello)),
                asyncio.create_task(self._write(call, self._outbox)),
                asyncio.create_task(self._watch()),
            ]
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in done:
                    end.result()
            except grpc.aio.AioRpcError as error:
                words = self._credentials.explain(error.details())
                raise LinkLostError(f"{error.code().name} {words}") from error
            except asyncio.InvalidStateError as error:
                raise LinkLostError("the stream is closed") from error
            finally:
                self._outbox = None
                self._ended.set()
                call.cancel()
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)

    async def _read(self, call: Call, hello: Hello) -> None:
        async for message in call:
            self._heard_at = _now()
            try:
                value = from_balancer(message, hello=hello, running=self._running())
            except InvalidMessageError as error:
                _log.warning("a message of the balancer is dropped (%s): %s", error.kind, error)
                self._dropped(message, str(error))
                continue
            if isinstance(value, Rejection) and value.not_leading:
                raise NotLeadingError(value.reason, leader_address=value.leader_address)
            if stale := self._staleness(value):
                _log.warning("a %s is dropped: %s", type(value).__name__, stale)
                self._dropped(message, stale)
                continue
            if not isinstance(value, Rejection):
                self._failures = 0
            self._say(f"linked to the balancer at {self._address}", level=logging.INFO)
            if not isinstance(value, HeartbeatAck):
                self._receive(value)
        raise LinkLostError("the balancer closed the stream")

    async def _write(self, call: Call, outbox: asyncio.Queue[WorkerMessage]) -> None:
        """Send what is put out, and a heartbeat at every interval, with a report if one is sent."""
        sequence = 0
        beat_at = _now() + self.heartbeat_interval_s
        while True:
            message: WorkerMessage
            if _now() >= beat_at:
                sequence += 1
                beat_at = _now() + self.heartbeat_interval_s
                message = self._heartbeat(sequence)
            else:
                try:
                    async with asyncio.timeout_at(beat_at):
                        message = await outbox.get()
                except TimeoutError:
                    continue
            if isinstance(message, Report):
                sequence += 1
                beat_at = _now() + self.heartbeat_interval_s * _REPORT_MAY_BE_LATE
                message = replace(message, heartbeat=self._heartbeat(sequence))
            await call.write(to_balancer(message))
            if isinstance(message, Leaving):
                # Nothing follows; the balancer reads to the end and closes.
                await call.done_writing()
                return await asyncio.Future()

    async def _watch(self) -> None:
        """End the stream when nothing is heard for too long: a hung peer closes no connection."""
        while True:
            left_s = self._heard_at + self._ack_timeout_s - _now()
            if left_s <= 0:
                self._waits.note(Wait.ACK, f"the balancer at {self._address} was given up")
                raise LinkLostError(f"no answer for {self._ack_timeout_s:g} s")
            await asyncio.sleep(left_s)

    def _staleness(self, value: BalancerMessage) -> str:
        """Why a message of a balancer that was succeeded must not be obeyed; empty if it may."""
        match value:
            case JoinEpoch() | Stage() | Abort() if value.term < self._highest_term:
                return (
                    f"term {value.term} is over, a balancer of term {self._highest_term} has taken "
                    "over"
                )
            case JoinEpoch() | Stage() | Abort():
                self._highest_term = value.term
        return ""

    def _next_address(self) -> str:
        """The address after the current one; the first when the current one was a hint."""
        if self._address not in self._addresses:
            return self._addresses[0]
        place = self._addresses.index(self._address) + 1
        return self._addresses[place % len(self._addresses)]

    def _say(self, message: str, *, level: int) -> None:
        """Log a balancer's change once, not every attempt."""
        if message != self._said.get(self._address):
            self._said[self._address] = message
            _log.log(level, "%s", message)


def _now() -> float:
    return asyncio.get_running_loop().time()

"""`Agent`: keeps a stream open to the leading balancer for the worker's lifetime.

It finds the leader, connects, detects a dead link and backs off. The `LinkHandler` decides what
messages mean. Nothing here ever delays serving.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import grpc

from equipoise.planning.layout import Layout
from equipoise.rank.errors import LinkLostError, NotLeadingError
from equipoise.rank.waits import ACK_TIMEOUT_S, Waits
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.tokens import BALANCER
from equipoise.wire.balancer_messages import (
    Abort,
    BalancerMessage,
    HeartbeatAck,
    JoinEpoch,
    Rejection,
    Stage,
    TermConfirmed,
)
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.limits import MAX_PUSH_BYTES
from equipoise.wire.messages import (
    Heartbeat,
    Hello,
    LayoutRejected,
    Leaving,
    Report,
    Wait,
    WorkerMessage,
)
from equipoise_api.v1 import worker_link_pb2 as pb
from equipoise_api.v1 import worker_link_pb2_grpc as pb_grpc

Call = grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]

_OUTBOX_LENGTH = 256
"""Messages that wait for the stream at most; further ones are dropped."""

_NOT_LEADING_BACKOFF_S = 2.0
"""Maximum backoff while balancers answer but none leads yet; an election takes seconds."""

_REPORT_MAY_BE_LATE = 1.1
"""Heartbeat intervals between a heartbeat sent with a report and one sent alone: by default the
next report is due at the same moment and carries the heartbeat."""

_CHANNEL_OPTIONS = (
    # A subchannel shared with an earlier attempt would wait out that attempt's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_PUSH_BYTES),
)

_log = logging.getLogger(__name__)


class LinkHandler(Protocol):
    """What the agent needs from its worker; called on the event loop, and must not block."""

    def hello(self) -> Hello:
        """Return the worker's current state, for a new stream."""

    def heartbeat(self, sequence: int) -> Heartbeat:
        """Return the worker's current heartbeat."""

    def running(self) -> Layout | None:
        """Return the layout in use, which a Stage may refer to; None if there is none."""

    def receive(self, message: BalancerMessage) -> None:
        """Handle a valid message other than an acknowledgement."""

    def message_dropped(self, message: pb.ConnectResponse, reason: str) -> None:
        """Handle a message that the agent dropped as invalid or outdated."""


class Outbox:
    """Messages for the balancer, kept only while a stream is open; for the event loop only."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[WorkerMessage] | None = None

    def open(self, hello: Hello) -> asyncio.Queue[WorkerMessage]:
        """Start keeping messages for a new stream, which begins with `hello`."""
        self._queue = asyncio.Queue(_OUTBOX_LENGTH)
        self._queue.put_nowait(hello)
        return self._queue

    def close(self) -> None:
        """Drop what is left; the next Hello reports the state."""
        self._queue = None

    def send(self, message: WorkerMessage) -> bool:
        """Send a message; returns False without a stream, whose Hello then reports the state."""
        if self._queue is None:
            return False
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            # The balancer stopped reading; the liveness check is about to close the stream.
            _log.warning("the balancer is not reading; dropped a %s", type(message).__name__)
        return True


class Agent:
    """The worker's end of the stream; used from the event loop only.

    A balancer that does not lead names the leader; one that cannot be reached is followed by the
    next address. A message of a lower term than the worker obeys is dropped, and the stream ends:
    its sender has lost its leadership and does not know yet. Only a balancer that renewed its lease
    after the Hello of a stream lowers the term, so no term that was pushed lasts without a leader.

    Between two attempts the agent waits a random time below a bound that doubles with each round of
    failures ("full jitter": AWS Architecture Blog, "Exponential Backoff And Jitter").
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        handler: LinkHandler,
        outbox: Outbox,
        credentials: Credentials,
        waits: Waits,
        heartbeat_interval_s: float = 1.0,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        backoff_s: float = 0.2,
        max_backoff_s: float = 5.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`addresses` are those of all balancers.

        `heartbeat_interval_s` holds until a JoinEpoch sets it. A balancer that sends nothing for
        `ack_timeout_s`, although it must acknowledge every heartbeat, is considered lost.
        """
        self._addresses = tuple(addresses)
        self._address = self._addresses[0]
        self._handler = handler
        self._outbox = outbox
        self._credentials = credentials
        self._waits = waits
        self._heartbeat_interval_s = heartbeat_interval_s
        self._ack_timeout_s = ack_timeout_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._uniform = uniform
        self._received_s = 0.0
        self._num_failures = 0
        self._highest_term = 0
        self._logged: dict[str, str] = {}
        self._leaving = False
        self._reopening = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Connect and reconnect, until cancelled or `leave` is called."""
        while not self._leaving:
            longest_s, leader = self._max_backoff_s, None
            try:
                await self._connect()
                continue  # `reopen` ended it.
            except NotLeadingError as error:
                longest_s, leader = min(longest_s, _NOT_LEADING_BACKOFF_S), error.leader_address
                by = "redirected by" if leader else "not accepted by"
                self._log_change(logging.INFO, f"{by} {self._address}: {error}")
            except LinkLostError as error:
                if not self._leaving:
                    self._log_change(
                        logging.WARNING, f"cannot reach balancer {self._address}: {error}; retrying"
                    )
            self._num_failures += 1
            self._address = leader or self._next_address()
            rounds = min(16, -(-self._num_failures // len(self._addresses)))
            bound_s = min(longest_s, self._backoff_s * 2**rounds)
            await asyncio.sleep(self._uniform(0, bound_s))

    def reopen(self) -> None:
        """End the stream, if one is open, and open another: its Hello has changed."""
        self._reopening.set()

    async def leave(self, reason: str, *, failed: bool = False, timeout_s: float = 2.0) -> None:
        """Announce the end of this process if a stream is open, and stop connecting.

        Waits at most `timeout_s` for the balancer to close the stream.
        """
        self._leaving = True
        if not self._outbox.send(Leaving(reason=reason, failed=failed)):
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("the balancer did not close the stream within %g s", timeout_s)

    async def _connect(self) -> None:
        """Run one stream from its Hello to its end; returns if `reopen` ended it."""
        try:
            opened = self._credentials.balancer_channel(self._address, options=_CHANNEL_OPTIONS)
        except TrustError as error:
            raise LinkLostError(str(error)) from error
        async with opened as channel:
            call: Call = pb_grpc.WorkerLinkStub(channel).Connect(
                None, metadata=self._credentials.metadata(audience=BALANCER)
            )
            self._reopening.clear()
            hello = replace(self._handler.hello(), highest_term=self._highest_term)
            queue = self._outbox.open(hello)
            self._ended.clear()
            self._received_s = _now_s()
            tasks = [
                asyncio.create_task(self._read(call, hello)),
                asyncio.create_task(self._write(call, queue)),
                asyncio.create_task(self._watch()),
                asyncio.create_task(self._reopening.wait()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            except grpc.aio.AioRpcError as error:
                details = self._credentials.explain(error.details())
                raise LinkLostError(f"{error.code().name} {details}") from error
            except asyncio.InvalidStateError as error:
                raise LinkLostError("the stream is closed") from error
            finally:
                self._outbox.close()
                self._ended.set()
                call.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                # An error refers to this frame, which must not refer to it, or to its task: the
                # connection would stay open until the garbage collector finds them.
                tasks.clear()
                del task

    async def _read(self, call: Call, hello: Hello) -> None:
        async for message in call:
            self._received_s = _now_s()
            try:
                value = from_balancer(message, hello=hello, running=self._handler.running())
            except InvalidMessageError as error:
                _log.warning("dropped an invalid message (%s): %s", error.kind, error)
                self._reject_epoch(message, str(error))
                self._handler.message_dropped(message, str(error))
                continue
            if isinstance(value, Rejection) and value.not_leading:
                raise NotLeadingError(value.reason, leader_address=value.leader_address)
            if isinstance(value, TermConfirmed):
                self._confirm(value, hello)
                continue
            if reason := self._outdated(value):
                self._handler.message_dropped(message, reason)
                raise LinkLostError(f"dropped a {type(value).__name__}: {reason}")
            if not isinstance(value, Rejection):
                self._num_failures = 0
                self._log_change(logging.INFO, f"linked to the balancer at {self._address}")
            if isinstance(value, JoinEpoch):
                self._heartbeat_interval_s = value.heartbeat_interval_s
            if not isinstance(value, HeartbeatAck):
                self._handler.receive(value)
        raise LinkLostError("the balancer closed the stream")

    def _reject_epoch(self, message: pb.ConnectResponse, reason: str) -> None:
        """Reject a dropped JoinEpoch: else the pool would wait for this rank and not know why."""
        if message.HasField("join_epoch"):
            join = message.join_epoch
            self._outbox.send(
                LayoutRejected(
                    epoch=join.epoch,
                    rank=join.rank,
                    generation=join.layout.generation,
                    reason=reason,
                )
            )

    async def _write(self, call: Call, queue: asyncio.Queue[WorkerMessage]) -> None:
        """Send queued messages, and a heartbeat at every interval: in a report if one is sent."""
        sequence = 0
        beat_s = _now_s() + self._heartbeat_interval_s
        while True:
            message: WorkerMessage
            if _now_s() >= beat_s:
                sequence += 1
                beat_s = _now_s() + self._heartbeat_interval_s
                message = self._handler.heartbeat(sequence)
            else:
                try:
                    async with asyncio.timeout_at(beat_s):
                        message = await queue.get()
                except TimeoutError:
                    continue
            if isinstance(message, Report):
                sequence += 1
                beat_s = _now_s() + self._heartbeat_interval_s * _REPORT_MAY_BE_LATE
                message = replace(message, heartbeat=self._handler.heartbeat(sequence))
            await call.write(to_balancer(message))
            if isinstance(message, Leaving):
                # It is the last message; the balancer reads to the end and closes the stream.
                await call.done_writing()
                return await asyncio.Future()

    async def _watch(self) -> None:
        """End the stream after a long silence: a hung peer does not close its connection."""
        while True:
            left_s = self._received_s + self._ack_timeout_s - _now_s()
            if left_s <= 0:
                self._waits.note(Wait.ACK, f"disconnected from the balancer at {self._address}")
                raise LinkLostError(f"no message from the balancer for {self._ack_timeout_s:g} s")
            await asyncio.sleep(left_s)

    def _confirm(self, confirmed: TermConfirmed, hello: Hello) -> None:
        """Obey a lower term, if its leader answers what this stream's Hello claims."""
        if confirmed.replaced_term == hello.highest_term == self._highest_term:
            _log.warning(
                "obeying term %d instead of %d: the balancer at %s renewed its lease in it",
                confirmed.term,
                confirmed.replaced_term,
                self._address,
            )
            self._highest_term = confirmed.term

    def _outdated(self, message: BalancerMessage) -> str:
        """Return why a former leader's message must be dropped, or an empty string."""
        match message:
            case JoinEpoch() | Stage() | Abort() if message.term < self._highest_term:
                return (
                    f"its term {message.term} has ended; the current term is {self._highest_term}"
                )
            case JoinEpoch() | Stage() | Abort():
                self._highest_term = message.term
        return ""

    def _next_address(self) -> str:
        """Return the address after the current one; the first if the current one was a redirect."""
        if self._address not in self._addresses:
            return self._addresses[0]
        index = self._addresses.index(self._address) + 1
        return self._addresses[index % len(self._addresses)]

    def _log_change(self, level: int, message: str) -> None:
        """Log a change in a balancer's state, not every attempt."""
        if message != self._logged.get(self._address):
            self._logged[self._address] = message
            _log.log(level, "%s", message)


def _now_s() -> float:
    return asyncio.get_running_loop().time()

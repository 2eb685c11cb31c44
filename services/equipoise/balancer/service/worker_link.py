"""The WorkerLink service: one stream per worker, isolated from the others."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc

from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.message_limit import MessageLimit, message_limit
from equipoise.balancer.pools import Pools
from equipoise.balancer.runner import PoolRunner
from equipoise.balancer.seat import Seat
from equipoise.balancer.service.send_budget import SendBudget, SendBudgets
from equipoise.balancer.unreadable import POOL_UNREADABLE
from equipoise.planning.errors import InvalidReportError
from equipoise.pool.agreement import UNKNOWN_LAYOUT
from equipoise.pool.hello_checks import NAME_TAKEN, RejectedWorkerError
from equipoise.pool.room import POOL_FULL
from equipoise.telemetry.logs import Causes, about, is_worth_logging
from equipoise.trust.identity import Caller
from equipoise.wire.balancer_messages import JoinEpoch, Rejection, Stage, TermConfirmed
from equipoise.wire.checks import reason
from equipoise.wire.convert import from_worker, to_worker
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.limits import max_message_bytes
from equipoise.wire.messages import Hello, Leaving, Report
from equipoise.wire.seal import UNREADABLE, unsealed
from equipoise_api.v1 import worker_link_pb2 as pb

HELLO_TIMEOUT_S = 10.0
"""Seconds within which a stream must send Hello."""

WRITE_TIMEOUT_S = 30.0
"""Seconds that a worker may take to read a message; then its stream ends."""

DRAIN_TIMEOUT_S = 1.0
"""Seconds that the last messages of a stream may take to be sent."""

_PASSING = {UNREADABLE, "hello_missing", NAME_TAKEN, POOL_FULL, POOL_UNREADABLE}
"""Rejections that a retry may overcome: the network corrupted, lost or delayed a message, the
stream of a worker that restarted is not closed yet, its pool is full, or the records of its pool
are to be repaired."""

_ENDING = {UNREADABLE: "damaged message", UNKNOWN_LAYOUT: "its layout is unknown"}
"""Rejections that end a stream, and the reason for its end."""

_Requests = AsyncIterator[bytes]
_Context = grpc.aio.ServicerContext[bytes, bytes]

_SERVICE = pb.DESCRIPTOR.services_by_name["WorkerLink"]

_log = logging.getLogger(__name__)


class _UnreadError(Exception):
    """A worker does not read what it is sent."""


@dataclass(frozen=True, slots=True)
class _End:
    """Why a stream ends: now, or once its worker ends it."""

    text: str
    at_once: bool = False


class WorkerLinkService:
    """Hands the messages of streams to pools, and their messages to streams.

    `caller` authenticates a call; a worker may send messages for itself only.
    """

    def __init__(self, seat: Seat, *, caller: Callable[[_Context], Caller]) -> None:
        self._seat = seat
        self._caller = caller
        self._rejected: Counter[str] = Counter()
        self._false_terms = Causes()
        self._loop_shares = seat.loop_shares
        self._send_budgets = SendBudgets()

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The service's handler, in bytes.

        Messages are encoded once for many workers, and undecodable bytes are the worker's fault.
        """
        connect = grpc.stream_stream_rpc_method_handler(self.connect)
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, {"Connect": connect})

    # A coroutine that writes, not a generator: its cleanup runs as soon as it is cancelled.
    async def connect(self, request_iterator: _Requests, context: _Context) -> None:
        """Serve one worker until its stream ends."""
        mailbox = Mailbox()
        try:
            caller = self._caller(context)
            hello = await self._introduced(request_iterator, caller)
            runner = await self._admit(hello, mailbox, caller=caller) if hello else None
        except (InvalidMessageError, RejectedWorkerError) as error:
            fatal = error.kind not in _PASSING
            await _turn_away(context, Rejection(reason=str(error), fatal=fatal))
            return
        if hello is None or runner is None:
            await _turn_away(context, self._redirection())
            return
        reason, is_read = "its stream was cut", True
        try:
            # Its shape and names; what it runs would take memory as long as the stream lives.
            hello = replace(hello, running=None, group_lost=None)
            reason, is_read = await self._converse(
                request_iterator, context, hello, runner, mailbox
            )
        finally:
            runner.leave(hello.worker, mailbox, reason=reason)
        if not is_read:
            _abandon()

    async def _introduced(self, requests: _Requests, caller: Caller) -> Hello | None:
        """The first message. It is logged if it is rejected, and counted here only.

        A count in a status would be state of a pool that the caller may not be in. Returns None if
        this balancer does not lead: after a failover a whole fleet may ask it for the leader.
        """
        try:
            first = await _first_message(requests)
            share = self._loop_shares.of(caller.pool)
            share.received(len(first))
            async with share.turn():
                message = _identified(first, caller)
                if self._seat.led is None:
                    return None
                hello = from_worker(message, hello=None)
        except (InvalidMessageError, RejectedWorkerError) as error:
            self._rejected[error.kind] += 1
            count = self._rejected[error.kind]
            if is_worth_logging(count):  # A caller that retries must not flood the log.
                _log.warning("rejected (%s, time %d): %s: %s", error.kind, count, caller, error)
            raise
        assert isinstance(hello, Hello), "the first message is Hello or rejected"
        return hello

    async def _leading(self, hello: Hello, mailbox: Mailbox) -> Pools | None:
        """The pools, if this balancer leads.

        A worker that obeys a higher term may have been connected to a leader elected since, so the
        lease must be renewed first. Beyond that its claim has no effect.
        """
        pools = self._seat.led
        if pools is None or hello.highest_term <= pools.term:
            return pools
        if not await pools.until_confirmed():
            return None
        if number := self._false_terms.count(hello.pool):
            _log.warning(
                "worker %s obeys term %d, but the lease of term %d was renewed since it connected: "
                "it must obey that term (%d such Hellos of its pool so far)",
                *(hello.worker, hello.highest_term, pools.term, number),
                extra=about(pool=hello.pool, worker=hello.worker, term=pools.term),
            )
        mailbox.post(TermConfirmed(term=pools.term, replaced_term=hello.highest_term))
        return pools

    async def _admit(self, hello: Hello, mailbox: Mailbox, *, caller: Caller) -> PoolRunner | None:
        """Let a worker into its pool; None if this balancer does not lead."""
        pools = await self._leading(hello, mailbox)
        if pools is None:
            return None
        try:
            is_certified = caller.is_worker(pool=hello.pool, worker=hello.worker)
            return await pools.admit(hello, mailbox, is_certified=is_certified)
        except RejectedWorkerError as error:
            pools.reject_worker(hello.pool, hello.worker, kind=error.kind, reason=str(error))
            raise

    async def _converse(
        self,
        requests: _Requests,
        context: _Context,
        hello: Hello,
        runner: PoolRunner,
        mailbox: Mailbox,
    ) -> tuple[str, bool]:
        """Read and write until either side ends.

        Returns why the stream ended, and whether its worker has read what was written to it.
        """
        reader = asyncio.create_task(self._read(requests, hello, runner, mailbox))
        budget = self._send_budgets.of(hello.pool)
        writer = asyncio.create_task(_write(mailbox, context, runner, budget))
        is_read_to_end = False
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            is_read_to_end = reader.done()
            if is_read_to_end:
                mailbox.close()
                await asyncio.wait({writer}, timeout=DRAIN_TIMEOUT_S)
        finally:
            reader.cancel()
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(reader, writer, return_exceptions=True)
        failure = None if writer.cancelled() else writer.exception()
        reason = reader.result() if is_read_to_end else _why_ended(failure)
        return reason, not isinstance(failure, _UnreadError)

    async def _read(
        self, requests: _Requests, hello: Hello, runner: PoolRunner, mailbox: Mailbox
    ) -> str:
        reason = "its stream ended"
        limit = message_limit(runner.pool.policy.values)
        try:
            async for request in requests:
                share = self._loop_shares.of(hello.pool)
                share.received(len(request))
                async with share.turn():
                    ended = _take(request, hello, runner, mailbox, limit=limit)
                reason = ended.text if ended is not None else reason
                if ended is not None and ended.at_once:
                    return reason
        except Exception:  # noqa: BLE001
            # A bug ends this stream only; the worker reconnects and reports what it runs.
            _log.exception("the stream of worker %s failed", hello.worker)
            return "the balancer failed on a message"
        return reason

    def _redirection(self) -> Rejection:
        return Rejection(
            reason=self._seat.elsewhere,
            fatal=True,
            not_leading=True,
            leader_address=self._seat.leader_address,
        )


def _take(
    request: bytes, hello: Hello, runner: PoolRunner, mailbox: Mailbox, *, limit: MessageLimit
) -> "_End | None":
    """Hand a message to its pool; returns why the stream ends, if it does."""
    try:
        _check_limits(request, hello, limit)
        value = from_worker(unsealed(request), hello=hello)
        if isinstance(value, Report) and value.heartbeat is not None:
            # First, because the report may be rejected.
            runner.receive(hello.worker, mailbox, value.heartbeat)
        runner.receive(hello.worker, mailbox, value)
    except (InvalidMessageError, InvalidReportError) as error:
        runner.reject(hello.worker, kind=error.kind, reason=f"worker {hello.worker}: {error}")
        # A new stream begins with all that matters.
        return _End(_ENDING[error.kind], at_once=True) if error.kind in _ENDING else None
    return _End(f"it left: {value.reason}") if isinstance(value, Leaving) else None


async def _first_message(requests: _Requests) -> bytes:
    """Raises InvalidMessageError: it is late or missing."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidMessageError(
            "hello_missing", f"no Hello within {HELLO_TIMEOUT_S:g} s"
        ) from None


def _identified(first: bytes, caller: Caller) -> pb.ConnectRequest:
    """Decode the first message, and check whose it is.

    Raises:
        InvalidMessageError: it is damaged.
        RejectedWorkerError: the caller is another worker.
    """
    message = unsealed(first)
    if message.HasField("hello"):
        # A caller with another worker's name must not cost the conversion of a large message.
        _check_identity(caller, message.hello)
    return message


def _check_identity(caller: Caller, hello: pb.Hello) -> None:
    """Reject a worker that claims to be another one."""
    if not caller.may_speak_for(pool=hello.pool, worker=hello.worker):
        raise RejectedWorkerError(
            "hello_identity",
            f"{caller} may not speak for worker {reason(hello.worker)} of pool "
            f"{reason(hello.pool)}: give it a certificate or token of its own",
        )


def _check_limits(request: bytes, hello: Hello, limit: MessageLimit) -> None:
    """Reject messages larger or more frequent than a worker of that shape sends.

    Raises:
        InvalidMessageError: "link_rate" or "link_size".
    """
    if not limit.take(now=asyncio.get_running_loop().time()):
        raise InvalidMessageError(
            "link_rate",
            f"more than {limit.per_s:g} messages per second: the excess is dropped",
        )
    size, most = len(request), max_message_bytes(hello)
    if size > most:
        raise InvalidMessageError(
            "link_size",
            f"a message of {size} bytes, but for {hello.model.num_layers} layers x "
            f"{hello.slots_per_rank} slots at most {most} are allowed",
        )


async def _write(
    mailbox: Mailbox, context: _Context, runner: PoolRunner, budget: SendBudget
) -> None:
    """Send a worker its messages.

    Raises:
        _UnreadError: it does not read them, or has not when this is cancelled.
    """
    loop = asyncio.get_running_loop()
    async for message in mailbox.messages():
        # Small ones do not wait for the readers of large ones.
        async with budget.turn() if isinstance(message, JoinEpoch | Stage) else nullcontext():
            # Checked right before sending: this process may have been paused since it was posted.
            if not runner.leads:
                return
            with runner.loop_share.charged():
                message_bytes = runner.encoder.encode(message)
            began_s = loop.time()
            write = budget.begin(context.write(message_bytes), num_bytes=len(message_bytes))
        try:
            await asyncio.wait({write}, timeout=WRITE_TIMEOUT_S)
        finally:
            if not write.done():
                what = f"a {type(message).__name__} of {len(message_bytes)} bytes"
                raise _UnreadError(f"it did not read {what} within {WRITE_TIMEOUT_S:g} s")
        write.result()
        runner.wave_turns.note_lag(loop.time() - began_s)


def _why_ended(failure: BaseException | None) -> str:
    """Why nothing more is written to a stream whose worker has not ended it."""
    if isinstance(failure, _UnreadError):
        return str(failure)
    return "the balancer closed its stream" if failure is None else "its stream broke"


async def _turn_away(context: _Context, rejection: Rejection) -> None:
    """Send a worker that is not admitted the reason."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(to_worker(rejection).SerializeToString())
    except TimeoutError:
        _abandon()


def _abandon() -> NoReturn:
    """End a call whose worker does not read, as if it were cut.

    gRPC would wait with a status until the worker has read the rest, and count the call meanwhile.
    """
    raise asyncio.CancelledError

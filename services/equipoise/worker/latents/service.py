"""`LatentTransferService`: sends blocks of latents to ranks of other pools, by content."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import grpc

from equipoise.rank.peer_streams import PeerStreams
from equipoise.telemetry.logs import is_worth_logging, printable
from equipoise.trust.guard import anonymous
from equipoise.trust.identity import Caller
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.latents import check_fetch, parts_of
from equipoise.worker.errors import NotServingError
from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.latents.puller import PULL_TIMEOUT_S
from equipoise.worker.latents.store import LatentStore, Visit
from equipoise.worker.scheduler import Scheduler
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc

MAX_STREAMS = 8
"""Fetches served at a time, and half of them for one caller; more wait, while their callers do."""

WRITE_TIMEOUT_S = 2.0
"""Time within which a caller must take a message."""

DRAIN_POLL_S = 0.05
"""How often a worker that stops looks for holds that have ended."""

_Context = grpc.aio.ServicerContext[pb.LatentTransferFetchRequest, pb.LatentTransferFetchResponse]
_ReleaseContext = grpc.aio.ServicerContext[
    pb.LatentTransferReleaseRequest, pb.LatentTransferReleaseResponse
]

_log = logging.getLogger(__name__)


class LatentTransferService(pb_grpc.LatentTransferServicer):
    """Serves `Fetch` and `Release`; used from the event loop only.

    A fetch holds a block only while it is copied, so a slow caller keeps no block from others. The
    hold of the request, which can end early, keeps those that are yet to be sent.
    """

    def __init__(
        self,
        store: LatentStore,
        *,
        visit: Visit,
        caller: Callable[[_Context], Caller] = anonymous,
        timeout_s: float = PULL_TIMEOUT_S,
    ) -> None:
        """A fetch ends after `timeout_s`: its caller does not wait for longer.

        `caller` authenticates a call, where the port requires credentials.
        """
        self._store = store
        self._visit = visit
        self._timeout_s = timeout_s
        self._streams = PeerStreams(MAX_STREAMS, caller=caller)
        self.rejected: Counter[str] = Counter()
        """Fetches that were rejected or cut off, by kind."""
        self.num_sent_bytes = 0
        """Bytes of blocks sent."""

    # A coroutine that writes, not a generator: its cleanup runs as soon as the caller is gone.
    async def Fetch(  # type: ignore[override]  # noqa: N802 - named by the contract
        self, request: pb.LatentTransferFetchRequest, context: _Context
    ) -> None:
        """Send the blocks with the request's keys, up to the first that is not here."""
        await self._check(request, context)
        async with self._streams.turn(context):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._send_all(request, context)
            except NotServingError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except TimeoutError:
                self.rejected["latents_slow"] += 1

    async def Release(  # noqa: N802 - named by the contract
        self, request: pb.LatentTransferReleaseRequest, _: _ReleaseContext
    ) -> pb.LatentTransferReleaseResponse:
        """End a hold of this process, if there is one."""
        if request.boot_id == self._store.boot_id:
            with suppress(NotServingError):  # Then it holds nothing.
                self._visit(lambda one: one.holds.end(request.hold, HoldEnd.RELEASED))
        return pb.LatentTransferReleaseResponse()

    async def drain(self, *, timeout_s: float) -> None:
        """Wait until every hold has ended, `timeout_s` seconds at most."""
        num_held, num_expired_before = self._open_and_expired()
        if not num_held:
            return
        _log.info("%d prompts are held for other pools: waiting until they are fetched", num_held)
        num_open, num_expired, until_s = num_held, 0, time.monotonic() + timeout_s
        while num_open and time.monotonic() < until_s:
            await asyncio.sleep(DRAIN_POLL_S)
            num_open, num_expired = self._open_and_expired()
        if num_lost := num_open + num_expired - num_expired_before:
            text = "%d of %d prompts were not fetched within %g s: other ranks prefill them again"
            _log.warning(text, num_lost, num_held, timeout_s)

    def _open_and_expired(self) -> tuple[int, int]:
        """How many holds are open, and how many have expired so far."""

        def count(scheduler: Scheduler) -> tuple[int, int]:
            # Without steps, as between two epochs, nothing else ends them.
            scheduler.holds.expire(time.monotonic())
            return scheduler.holds.num_open, scheduler.holds.ended[HoldEnd.EXPIRED]

        with suppress(NotServingError):
            return self._visit(count)
        return 0, 0

    async def _check(self, request: pb.LatentTransferFetchRequest, context: _Context) -> None:
        """Reject a fetch that cannot be served, with the reason."""
        store = self._store
        try:
            check_fetch(request, max_blocks=store.max_blocks)
        except InvalidMessageError as error:
            await self._reject(context, grpc.StatusCode.INVALID_ARGUMENT, error.kind, str(error))
        if request.form != store.form:
            await self._reject(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                "latents_form",
                f"the latents of this worker are {store.form}, not {printable(request.form)[:253]}",
            )
        if request.boot_id != store.boot_id:
            await self._reject(
                context, grpc.StatusCode.NOT_FOUND, "latents_boot", "this is another process"
            )

    async def _reject(
        self, context: _Context, code: grpc.StatusCode, kind: str, reason: str
    ) -> None:
        self.rejected[kind] += 1
        if is_worth_logging(self.rejected[kind]):
            count, peer = self.rejected[kind], context.peer()
            _log.warning("rejected a fetch of latents by %s (%d so far): %s", peer, count, reason)
        await context.abort(code, reason)

    async def _send_all(self, request: pb.LatentTransferFetchRequest, context: _Context) -> None:
        for index, key in enumerate(request.keys):
            data = await self._read(key)
            if data is None or not await self._send(index, data, context):
                return
        self._visit(lambda one: one.holds.end(request.hold, HoldEnd.FETCHED))

    async def _read(self, key: bytes) -> bytes | None:
        """Copy the block with this key, which is held meanwhile; None if it is not cached."""
        block = self._visit(lambda scheduler: _held(scheduler, key))
        if block is None:
            return None
        try:
            return await asyncio.to_thread(self._store.cache.read_block, block)
        finally:
            self._visit(lambda scheduler: scheduler.blocks.release(block))

    async def _send(self, index: int, data: bytes, context: _Context) -> bool:
        """Send one block; False if the caller does not read."""
        for part in parts_of(index, data):
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(part)
            except TimeoutError:
                self.rejected["latents_unread"] += 1
                return False
        self.num_sent_bytes += len(data)
        return True


def _held(scheduler: Scheduler, key: bytes) -> int | None:
    """Hold the block with this key; None if it is not cached."""
    block = scheduler.blocks.find(key)
    if block is not None:
        scheduler.blocks.hold(block)
    return block

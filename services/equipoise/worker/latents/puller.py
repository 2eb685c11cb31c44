"""`LatentPuller`: fetches a prompt's latents from the rank that prefilled it, before it is queued.

Only speed depends on it: blocks are verified before they can be found, and what is missing is
prefilled.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial

import grpc

from equipoise.rank.waits import Waits
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.tokens import worker_audience
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference_messages import LatentSource
from equipoise.wire.latents import BlockStream
from equipoise.wire.messages import Wait
from equipoise.worker.latents.pulls import Pull
from equipoise.worker.latents.store import LatentStore, Visit
from equipoise.worker.scheduler import Scheduler
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc

MAX_PULLS = 4
"""Prompts fetched at a time."""

PULL_TIMEOUT_S = 10.0
"""Time for one prompt, with the wait for its turn."""

_RELEASE_TIMEOUT_S = 1.0
_REJECTIONS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)

_log = logging.getLogger(__name__)


class PullOutcome(StrEnum):
    """What came of a pull."""

    WHOLE = "whole"
    """All full blocks are here, fetched or cached before."""

    PARTIAL = "partial"
    """There was no room for all, or the source did not have all."""

    LOST = "lost"
    """The source is gone, or another process, or failed meanwhile."""

    REJECTED = "rejected"
    """The source does not allow it, or its pool is not a peer of this one."""

    CORRUPTED = "corrupted"
    """The source sent an invalid block; those before it are kept."""

    TIMEOUT = "timeout"
    """It took too long."""

    GAVE_WAY = "gave_way"
    """Running requests needed the blocks."""

    CANCELLED = "cancelled"
    """The request ended."""


class LatentPuller:
    """Fetches from workers of `peer_pools`; used from the event loop only."""

    def __init__(
        self,
        store: LatentStore,
        *,
        peer_pools: Collection[str],
        credentials: Credentials,
        waits: Waits,
        bytes_per_s: float = math.inf,
        timeout_s: float = PULL_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._peer_pools = peer_pools
        self._credentials = credentials
        self._waits = waits
        self._bytes_per_s = bytes_per_s
        self._timeout_s = timeout_s
        self._limit = asyncio.Semaphore(MAX_PULLS)
        self._next_block_s = 0.0
        self.outcomes: Counter[PullOutcome] = Counter()
        """Pulls that have ended."""
        self.num_bytes = 0
        """Bytes of fetched blocks, verified and published."""

    async def pull(
        self, key: int, tokens: Sequence[int], source: LatentSource, *, visit: Visit
    ) -> None:
        """Make the full blocks of a prompt findable; they are held until the request is admitted.

        `key` is the request's. Never raises but CancelledError.
        """
        outcome, reason = PullOutcome.CANCELLED, ""
        try:
            async with asyncio.timeout(self._timeout_s), self._limit:
                outcome, reason = await self._pull(key, tokens, source, visit=visit)
        except TimeoutError:
            outcome, reason = PullOutcome.TIMEOUT, f"it took {self._timeout_s:g} s"
            self._waits.note(
                Wait.LATENTS, f"from {source.worker}: the rest of the prompt is prefilled"
            )
        finally:
            visit(lambda scheduler: scheduler.pulls.stop(key))
            self.outcomes[outcome] += 1
            if reason:
                _log.warning(
                    "latents from %s of pool %s at %s: %s (%s); the rest is prefilled",
                    *(source.worker, source.pool, source.address, reason, outcome),
                )

    async def _pull(
        self, key: int, tokens: Sequence[int], source: LatentSource, *, visit: Visit
    ) -> tuple[PullOutcome, str]:
        if source.pool not in self._peer_pools:
            return PullOutcome.REJECTED, "its pool is not among this worker's peer_pools"
        pull = visit(lambda scheduler: scheduler.begin_pull(key, tokens))
        try:
            channel = self._credentials.worker_channel(source.address)
        except TrustError as error:
            return PullOutcome.REJECTED, str(error)
        async with channel:
            stub = pb_grpc.LatentTransferStub(channel)
            num_asked = len(pull.missing)
            outcome, reason = _outcome(pull), ""
            try:
                if num_asked:
                    outcome, reason = await self._fetch(stub, key, pull, source, visit=visit)
            except InvalidMessageError as error:
                outcome, reason = PullOutcome.CORRUPTED, str(error)
            except grpc.aio.AioRpcError as error:
                details = self._credentials.explain(error.details())
                outcome = PullOutcome.REJECTED if error.code() in _REJECTIONS else PullOutcome.LOST
                return outcome, f"{error.code().name} {details}"
            if not num_asked or outcome is not PullOutcome.WHOLE:
                await self._release(stub, source)
        return outcome, reason

    async def _fetch(
        self,
        stub: "pb_grpc.LatentTransferAsyncStub",
        key: int,
        pull: Pull,
        source: LatentSource,
        *,
        visit: Visit,
    ) -> tuple[PullOutcome, str]:
        cache = self._store.cache
        stream = BlockStream(num_blocks=len(pull.missing), block_bytes=cache.block_bytes)
        request = pb.LatentTransferFetchRequest(
            form=self._store.form, boot_id=source.boot_id, hold=source.hold, keys=pull.missing
        )
        call = stub.Fetch(request, metadata=self._metadata(source))

        def land(data: bytes, scheduler: Scheduler) -> bool:
            block = scheduler.pulls.next_block(key, pull)
            if block is None:
                return False
            # Written under the lock, or a block that gave way might be another request's by now.
            cache.write_block(block, data)
            scheduler.pulls.publish(pull)
            return True

        try:
            async for part in call:
                data = stream.add(part)
                if data is None:
                    continue
                if not visit(partial(land, data)):
                    return PullOutcome.GAVE_WAY, ""
                self.num_bytes += len(data)
                await self._until_turn(len(data))
        finally:
            call.cancel()
        return _outcome(pull), ""

    async def _release(self, stub: "pb_grpc.LatentTransferAsyncStub", source: LatentSource) -> None:
        """End the hold, of which nothing more is needed; it expires if that fails."""
        with suppress(grpc.aio.AioRpcError):
            await stub.Release(
                pb.LatentTransferReleaseRequest(boot_id=source.boot_id, hold=source.hold),
                metadata=self._metadata(source),
                timeout=_RELEASE_TIMEOUT_S,
            )

    def _metadata(self, source: LatentSource) -> tuple[tuple[str, str], ...]:
        return self._credentials.metadata(audience=worker_audience(source.pool, source.worker))

    async def _until_turn(self, num_bytes: int) -> None:
        """Wait until the rate limit allows the next block."""
        now_s = asyncio.get_running_loop().time()
        self._next_block_s = max(now_s, self._next_block_s) + num_bytes / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._next_block_s - now_s))


def _outcome(pull: Pull) -> PullOutcome:
    is_whole = pull.num_ready == len(pull.keys)
    return PullOutcome.WHOLE if is_whole else PullOutcome.PARTIAL

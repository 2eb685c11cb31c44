"""`LatentPuller`: fetches a prompt's latents from the rank that prefilled it, before it is queued.

Only speed depends on it: blocks are verified before they can be found, and what is missing is
prefilled.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from enum import StrEnum
from functools import partial

import grpc

from equipoise.rank.waits import Waits
from equipoise.telemetry.logs import is_worth_logging
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
from equipoise_model.latent_cache import ArrivingBlock

MAX_PULLS = 4
"""Prompts fetched at a time."""

PULL_TIMEOUT_S = 10.0
"""Time for one prompt, with the wait for its turn."""

ROOM_POLL_S = 0.02
"""How often the first request in line for blocks looks whether there are enough."""

_RELEASE_TIMEOUT_S = 5.0
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
    """The source did not have all."""

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
        self._line, self._limit = asyncio.Lock(), asyncio.Semaphore(MAX_PULLS)
        self._releasing: set[asyncio.Task[None]] = set()
        self._next_block_s = 0.0
        self.outcomes: Counter[PullOutcome] = Counter()
        """Pulls that have ended."""
        self.num_bytes = 0
        """Bytes of fetched blocks, verified and published."""

    async def pull(self, key: int, source: LatentSource, *, visit: Visit) -> None:
        """Make the full blocks of a queued request findable; they are held until its admission.

        `key` is the request's. It waits for room without a limit, but fetches within the timeout.
        Never raises but CancelledError.
        """
        outcome, reason = PullOutcome.CANCELLED, ""
        try:
            outcome, reason = await self._pull(key, source, visit=visit)
        finally:
            visit(lambda scheduler: scheduler.end_pull(key))
            self.outcomes[outcome] += 1
            count = self.outcomes[outcome]
            if reason and is_worth_logging(count):
                _log.warning(
                    "latents from %s of pool %s at %s: %s (%s, %d so far); the rest is prefilled",
                    *(source.worker, source.pool, source.address, reason, outcome, count),
                )

    async def _pull(
        self, key: int, source: LatentSource, *, visit: Visit
    ) -> tuple[PullOutcome, str]:
        if source.pool not in self._peer_pools:
            return PullOutcome.REJECTED, "its pool is not among this worker's peer_pools"
        outcome, reason, was_all_sent = PullOutcome.WHOLE, "", False
        try:
            pull = await self._begin(key, visit)
            if pull.missing:
                async with asyncio.timeout(self._timeout_s), self._limit:
                    outcome = await self._fetch(key, pull, source, visit=visit)
                was_all_sent = outcome is PullOutcome.WHOLE
        except TimeoutError:
            self._waits.note(
                Wait.LATENTS, f"from {source.worker}: the rest of the prompt is prefilled"
            )
            outcome, reason = PullOutcome.TIMEOUT, f"it took {self._timeout_s:g} s"
        except InvalidMessageError as error:
            outcome, reason = PullOutcome.CORRUPTED, str(error)
        except TrustError as error:
            outcome, reason = PullOutcome.REJECTED, str(error)
        except grpc.aio.AioRpcError as error:
            outcome = PullOutcome.REJECTED if error.code() in _REJECTIONS else PullOutcome.LOST
            reason = f"{error.code().name} {self._credentials.explain(error.details())}"
        finally:
            if not was_all_sent:
                # The request does not wait for it, and may even have ended.
                releasing = asyncio.create_task(self._release(source))
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)
        return outcome, reason

    async def _begin(self, key: int, visit: Visit) -> Pull:
        """Take blocks as soon as there are enough, in the order of requests."""
        async with self._line:
            while True:
                pull = visit(lambda scheduler: scheduler.begin_pull(key))
                if pull is not None:
                    return pull
                await asyncio.sleep(ROOM_POLL_S)

    async def _fetch(
        self, key: int, pull: Pull, source: LatentSource, *, visit: Visit
    ) -> PullOutcome:
        if not pull.missing:
            return PullOutcome.GAVE_WAY  # While it waited for its turn.
        cache = self._store.cache
        stream = BlockStream(num_blocks=len(pull.missing), block_bytes=cache.block_bytes)
        request = pb.LatentTransferFetchRequest(
            form=self._store.form, boot_id=source.boot_id, hold=source.hold, keys=pull.missing
        )

        def land(arrived: ArrivingBlock, scheduler: Scheduler) -> bool:
            block = scheduler.pulls.next_block(key, pull)
            if block is None:
                return False
            # Written under the lock, or a block that gave way might be another request's by now.
            cache.write_block(block, arrived)
            scheduler.pulls.publish(pull)
            return True

        async with self._credentials.worker_channel(source.address) as channel:
            call = pb_grpc.LatentTransferStub(channel).Fetch(
                request, metadata=self._metadata(source)
            )
            try:
                async for part in call:
                    data = stream.add(part)
                    if data is None:
                        continue
                    # Before the lock is taken: no step waits for copies from the host.
                    arrived = await asyncio.to_thread(cache.unpack, data)
                    if not visit(partial(land, arrived)):
                        return PullOutcome.GAVE_WAY
                    self.num_bytes += len(data)
                    await self._until_turn(len(data))
            finally:
                call.cancel()
        return PullOutcome.WHOLE if pull.num_ready == len(pull.keys) else PullOutcome.PARTIAL

    async def _release(self, source: LatentSource) -> None:
        """End the hold, of which nothing more is needed; it expires if that fails."""
        with suppress(grpc.aio.AioRpcError, TrustError):
            async with self._credentials.worker_channel(source.address) as channel:
                await pb_grpc.LatentTransferStub(channel).Release(
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

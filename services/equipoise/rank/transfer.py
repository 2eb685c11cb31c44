"""Moves experts between ranks: `ExpertTransferService` serves them, `ExpertPuller` pulls them.

Pulled bytes are accepted only if their checksum matches. Nothing here writes to a slot: pulled
experts go to staging memory.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from torch import Tensor

from equipoise.planning.arrays import Checksums
from equipoise.planning.moves import CheckpointSource, Move, RankSource, Source
from equipoise.rank.errors import NotHeldError, TransferError
from equipoise.rank.held import HeldExperts
from equipoise.rank.peer_streams import PeerStreams
from equipoise.rank.waits import SOURCE_TIMEOUT_S, Waits
from equipoise.telemetry.logs import is_worth_logging
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.guard import anonymous
from equipoise.trust.identity import Caller
from equipoise.trust.tokens import worker_audience
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import Wait
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc
from equipoise_model.experts import checksum, payload_from_bytes

CHUNK_BYTES = 256 * 1024
"""Size of a message: large enough to be cheap, small enough for a slow peer to hold."""

_MAX_STREAMS = 8
"""Experts sent at a time: each is a copy in memory."""

_MAX_PULLS = 4
"""Experts that a rank pulls at a time: as many as one peer sends it."""

_WRITE_TIMEOUT_S = 2.0
"""Time within which a peer must take a message; far slower than any usable peer."""

_STREAM_TIMEOUT_S = SOURCE_TIMEOUT_S
"""Time within which a peer must take an expert: it does not wait for longer."""

_EPOCH_WAIT_S = 2.0

_MISMATCH_TIMEOUT_S = 1.0
"""Time within which a peer must take notice of wrong bytes."""

_Context = grpc.aio.ServicerContext[Any, Any]

Suspect = Callable[[int, int], None]
"""Takes the layer and the expert of which a peer got wrong bytes."""


def _suspect_nothing(_layer: int, _expert: int) -> None:
    """Slots are not verified again."""


_log = logging.getLogger(__name__)


class ExpertTransferService(pb_grpc.ExpertTransferServicer):
    """Streams experts from this rank's slots.

    A peer that reads too slowly is cut off, and no peer gets more than half of the streams.
    """

    def __init__(
        self,
        *,
        caller: Callable[[_Context], Caller] = anonymous,
        write_timeout_s: float = _WRITE_TIMEOUT_S,
        stream_timeout_s: float = _STREAM_TIMEOUT_S,
    ) -> None:
        """`caller` authenticates a call, where the port requires credentials."""
        self._streams = PeerStreams(_MAX_STREAMS, caller=caller)
        self._write_timeout_s = write_timeout_s
        self._stream_timeout_s = stream_timeout_s
        self._held: HeldExperts[Any] | None = None
        self._epoch = 0
        self._suspect: Suspect = _suspect_nothing
        self._epoch_changed = asyncio.Event()
        self.num_stalled = 0
        """Streams ended because the peer read too slowly."""

    def open(self, held: HeldExperts[Any], *, epoch: int, suspect: Suspect | None = None) -> None:
        """Start serving the peers of an epoch; callers in another epoch are rejected.

        `suspect` is called with the layer and the expert when a peer got wrong bytes of it.
        """
        self._held, self._epoch, self._suspect = held, epoch, suspect or _suspect_nothing
        # Wakes all tasks that wait now.
        self._epoch_changed.set()
        self._epoch_changed.clear()

    # A coroutine that writes, not a generator: its cleanup runs as soon as the peer disconnects.
    async def Fetch(  # type: ignore[override]  # noqa: N802 - named by the proto
        self, request: pb.FetchRequest, context: _Context
    ) -> None:
        """Send a consistent copy of one expert's payload, in chunks."""
        await self._until_epoch(request.epoch)
        if self._held is None or request.epoch != self._epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this rank serves in epoch {self._epoch}, not {request.epoch}",
            )
        if request.mismatched:
            self._suspect(request.layer, request.expert)
            return
        assert self._held is not None
        async with self._streams.turn(context):
            try:
                payload = await asyncio.to_thread(
                    self._held.read, layer=request.layer, expert=request.expert
                )
            except NotHeldError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            try:
                async with asyncio.timeout(self._stream_timeout_s):
                    for chunk in payload.split(CHUNK_BYTES):
                        response = pb.FetchResponse(data=chunk.numpy().tobytes())
                        async with asyncio.timeout(self._write_timeout_s):
                            await context.write(response)
            except TimeoutError:
                self._note_stalled(request, context.peer())

    def _note_stalled(self, request: pb.FetchRequest, peer: str) -> None:
        """Count a stream that ends short: the peer finds too few bytes, if it ever reads them."""
        self.num_stalled += 1
        if is_worth_logging(self.num_stalled):
            _log.warning(
                "stopped sending expert %d of layer %d to %s, which read nothing for %g s, or not "
                "all of it in %g s (%d streams so far)",
                request.expert,
                request.layer,
                peer,
                self._write_timeout_s,
                self._stream_timeout_s,
                self.num_stalled,
            )

    async def _until_epoch(self, epoch: int) -> None:
        """Wait for a peer's epoch: a peer may learn of it slightly earlier than this worker."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_EPOCH_WAIT_S):
                while self._epoch < epoch:
                    await self._epoch_changed.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """Verified experts, and where their bytes came from."""

    payloads: tuple[Tensor, ...]
    """In the order of the moves."""
    peer_bytes: int
    checkpoint_bytes: int


class ExpertPuller:
    """Pulls experts for one epoch, from each move's sources in order until the bytes verify."""

    def __init__(
        self,
        join_epoch: JoinEpoch,
        *,
        pool: str,
        held: HeldExperts[Any] | None,
        read_checkpoint: Callable[[int, int], Awaitable[Tensor]],
        checksums: Checksums,
        expert_bytes: int,
        credentials: Credentials,
        waits: Waits,
        bytes_per_s: float = math.inf,
        source_timeout_s: float = SOURCE_TIMEOUT_S,
    ) -> None:
        """`pool` is that of the peers.

        `held` serves moves whose source is this rank; None before its slots are filled.
        `read_checkpoint` returns the payload of (layer, expert). `checksums` are those of all
        experts by this worker's checkpoint, [layers, experts, 16]. `bytes_per_s`
        limits the rate at which pulls start, so that steps sharing cores or a network with them
        keep their pace. `source_timeout_s` bounds each attempt.
        """
        assert bytes_per_s > 0
        self._epoch = join_epoch.epoch
        self._rank = join_epoch.rank
        self._peers = join_epoch.peers
        self._pool = pool
        self._held = held
        self._read_checkpoint = read_checkpoint
        self._checksums = checksums
        self._expert_bytes = expert_bytes
        self._credentials = credentials
        self._source_timeout_s = source_timeout_s
        self._waits = waits
        self._pull_interval_s = expert_bytes / bytes_per_s
        self._next_pull_s = 0.0
        # The credentials' version and the channel, by rank.
        self._channels: dict[int, tuple[int, grpc.aio.Channel]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.num_corrupted = 0
        """Number of pulled experts whose bytes failed their checksum."""

    async def pull(self, moves: Sequence[Move]) -> PullResult:
        """Pull the experts of some moves, at most four at a time.

        Raises:
            TransferError: no source delivered an expert; names every source and its fault.
        """
        limit = asyncio.Semaphore(_MAX_PULLS)
        # Ranks that failed during this call are tried last: one hung peer costs one timeout.
        failed: set[int] = set()

        async def pull_one(move: Move) -> tuple[Tensor, Source]:
            async with limit:
                await self._until_turn()
                return await self._pull_one(move, failed)

        tasks = [asyncio.ensure_future(pull_one(move)) for move in moves]
        try:
            pulled = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        num_peer = sum(isinstance(source, RankSource) for _, source in pulled)
        return PullResult(
            payloads=tuple(payload for payload, _ in pulled),
            peer_bytes=num_peer * self._expert_bytes,
            checkpoint_bytes=(len(pulled) - num_peer) * self._expert_bytes,
        )

    async def close(self) -> None:
        """Close the connections to peers."""
        for _, channel in self._channels.values():
            await channel.close(grace=None)
        self._channels.clear()
        await asyncio.gather(*self._closing)

    async def _until_turn(self) -> None:
        """Wait until the rate limit allows the next pull."""
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._next_pull_s)
        self._next_pull_s = begin_s + self._pull_interval_s
        await asyncio.sleep(begin_s - now_s)

    async def _pull_one(self, move: Move, failed: set[int]) -> tuple[Tensor, Source]:
        own = self._checksums[move.layer, move.expert].tobytes()
        if move.checksum != own:
            raise TransferError(
                f"expert {move.expert} of layer {move.layer} has checksum {own.hex()} in this "
                f"worker's checkpoint, but the balancer expects {move.checksum.hex()}"
            )
        faults = []
        for source in _in_order(move.sources, failed):
            try:
                async with asyncio.timeout(self._source_timeout_s):
                    payload = await self._read(source, move)
                await self._verify(payload, move, source)
            except (TransferError, NotHeldError) as error:
                fault = str(error)
            except TimeoutError:
                fault = f"no answer in {self._source_timeout_s:g} s"
                what = f"expert {move.expert} of layer {move.layer} from {self._name(source)}"
                self._waits.note(Wait.PULL, f"{what}: tried the next source")
            else:
                return payload, source
            faults.append(f"{self._name(source)}: {fault}")
            _log.warning(
                "could not fetch expert %d of layer %d from %s",
                move.expert,
                move.layer,
                faults[-1],
            )
            if isinstance(source, RankSource):
                failed.add(source.rank)
        raise TransferError(
            f"expert {move.expert} of layer {move.layer} is unavailable from every source "
            f"({'; '.join(faults)})"
        )

    async def _read(self, source: Source, move: Move) -> Tensor:
        if isinstance(source, CheckpointSource):
            return await self._read_checkpoint(move.layer, move.expert)
        if source.rank == self._rank and self._held is not None:
            return await asyncio.to_thread(self._held.read, layer=move.layer, expert=move.expert)
        return payload_from_bytes(await self._fetch(source.rank, move))

    def _call(
        self, rank: int, move: Move, *, mismatched: bool = False, timeout_s: float = math.inf
    ) -> "grpc.aio.UnaryStreamCall[pb.FetchRequest, pb.FetchResponse]":
        if not 0 <= rank < len(self._peers):
            raise TransferError(f"there is no rank {rank} in epoch {self._epoch}")
        request = pb.FetchRequest(
            epoch=self._epoch, layer=move.layer, expert=move.expert, mismatched=mismatched
        )
        return pb_grpc.ExpertTransferStub(self._channel(rank)).Fetch(
            request,
            timeout=min(timeout_s, self._source_timeout_s),
            metadata=self._credentials.metadata(
                audience=worker_audience(self._pool, self._peers[rank].worker)
            ),
        )

    def _channel(self, rank: int) -> grpc.aio.Channel:
        """The channel to a peer; a new one after certificates were reloaded."""
        known, version = self._channels.get(rank), self._credentials.version()
        if known is not None and known[0] == version:
            return known[1]
        try:
            channel = self._credentials.worker_channel(self._peers[rank].address)
        except TrustError as error:
            raise TransferError(str(error)) from error
        if known is not None:
            closing = asyncio.create_task(known[1].close(grace=self._source_timeout_s))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._channels[rank] = version, channel
        return channel

    async def _fetch(self, rank: int, move: Move) -> bytearray:
        call = self._call(rank, move)
        data = bytearray()
        try:
            async for response in call:
                data += response.data
                if len(data) > self._expert_bytes:
                    raise TransferError(f"sent more than an expert's {self._expert_bytes} bytes")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            details = self._credentials.explain(error.details())
            raise TransferError(f"{error.code().name} {details}") from error
        finally:
            call.cancel()
        return data

    async def _verify(self, payload: Tensor, move: Move, source: Source) -> None:
        found = await asyncio.to_thread(checksum, payload)
        if found != move.checksum:
            self.num_corrupted += 1
            # A stream that ended short says nothing about the slot.
            if isinstance(source, RankSource) and payload.numel() == self._expert_bytes:
                await self._report(source.rank, move)
            raise TransferError(
                f"corrupted: {payload.numel()} bytes with checksum {found.hex()}, "
                f"not {move.checksum.hex()}"
            )

    async def _report(self, rank: int, move: Move) -> None:
        """Report wrong bytes to the peer that sent them, if it can be reached."""
        with suppress(grpc.aio.AioRpcError, TransferError):
            call = self._call(rank, move, mismatched=True, timeout_s=_MISMATCH_TIMEOUT_S)
            try:
                async for _ in call:
                    break  # An older release sends the bytes again.
            finally:
                call.cancel()

    def _name(self, source: Source) -> str:
        if isinstance(source, CheckpointSource):
            return "checkpoint"
        known = 0 <= source.rank < len(self._peers)
        return f"rank {source.rank} ({self._peers[source.rank].worker if known else 'unknown'})"


def _in_order(sources: Iterable[Source], failed: set[int]) -> list[Source]:
    """Ranks in order of preference, failed ones after the others, and finally the checkpoint."""
    ranks = [source for source in sources if isinstance(source, RankSource)]
    return [*sorted(ranks, key=lambda source: source.rank in failed), CheckpointSource()]

"""Experts' bytes between ranks: `ExpertTransferService` gives them, `ExpertPuller` gets them.

Pulled bytes are believed only by their checksum. Nothing here touches a slot: what is pulled goes
to staging memory.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import grpc
from torch import Tensor

from equipoise.planning.moves import CheckpointSource, Move, RankSource, Source
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.wire.messages import Peer, Wait
from equipoise.worker.errors import NotHeldError, TransferError
from equipoise.worker.held import HeldExperts
from equipoise.worker.waits import SOURCE_TIMEOUT_S, Waits
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc
from equipoise_model.experts import checksum, payload_from_bytes

CHUNK_BYTES = 256 * 1024
"""Large enough that messages cost little, small enough that a slow peer holds little memory."""

_MAX_STREAMS = 8
_MAX_PULLS = 4
_EPOCH_WAIT_S = 2.0

_log = logging.getLogger(__name__)


class ExpertTransferService(pb_grpc.ExpertTransferServicer):
    """Streams experts from this rank's slots; a slow peer costs one copy of one expert."""

    def __init__(self) -> None:
        self._held: HeldExperts | None = None
        self._epoch = 0
        self._opened = asyncio.Event()
        self._streams = asyncio.Semaphore(_MAX_STREAMS)

    def open(self, held: HeldExperts, *, epoch: int) -> None:
        """Begin to answer peers of an epoch; others are refused."""
        self._held, self._epoch = held, epoch
        opened, self._opened = self._opened, asyncio.Event()
        opened.set()

    # A coroutine that writes, not a generator: its clean-up runs the moment the peer goes away.
    async def Fetch(  # type: ignore[override]  # noqa: N802 - named by the contract
        self,
        request: pb.FetchRequest,
        context: grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse],
    ) -> None:
        """Send one expert's payload in chunks, as it was at one moment."""
        await self._until_epoch(request.epoch)
        if self._held is None or request.epoch != self._epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this rank serves in epoch {self._epoch}, not {request.epoch}",
            )
        assert self._held is not None
        async with self._streams:
            try:
                payload = await asyncio.to_thread(
                    self._held.read, layer=request.layer, expert=request.expert
                )
            except NotHeldError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            for chunk in payload.split(CHUNK_BYTES):
                await context.write(pb.FetchResponse(data=chunk.numpy().tobytes()))

    async def _until_epoch(self, epoch: int) -> None:
        """A peer may hear of a new epoch a little before this worker does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_EPOCH_WAIT_S):
                while self._epoch < epoch:
                    await self._opened.wait()


class ExpertStore(Protocol):
    """Where every expert can be read as the checkpoint stores it; it must bear many threads."""

    def read_expert(self, layer: int, expert: int) -> Tensor:
        """The payload of a logical expert of a MoE layer, uint8 [expert_bytes]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Verified payloads, in the order of their moves, and where the bytes came from."""

    payloads: tuple[Tensor, ...]
    peer_bytes: int
    checkpoint_bytes: int


class ExpertPuller:
    """Pulls experts from sources in order of preference until the bytes are right.

    `peers` are the ranks of the epoch in rank order. One source is waited for at most
    `source_timeout_s` per expert. No more than `bytes_per_s` are asked for in a second, so that
    steps which share cores or a network with the pulls keep their pace.
    """

    def __init__(
        self,
        *,
        checkpoint: ExpertStore,
        held: HeldExperts | None,
        epoch: int,
        rank: int,
        peers: Sequence[Peer],
        expert_bytes: int,
        credentials: Credentials | None = None,
        source_timeout_s: float = SOURCE_TIMEOUT_S,
        bytes_per_s: float = math.inf,
        waits: Waits | None = None,
    ) -> None:
        assert bytes_per_s > 0
        self._checkpoint = checkpoint
        self._held = held
        self._epoch = epoch
        self._rank = rank
        self._peers = peers
        self._expert_bytes = expert_bytes
        self._credentials = credentials or Credentials()
        self._source_timeout_s = source_timeout_s
        self._waits = waits or Waits()
        self._pull_interval_s = expert_bytes / bytes_per_s
        self._next_pull_s = 0.0
        self._channels: dict[tuple[int, int], grpc.aio.Channel] = {}
        self._num_corrupted = 0

    @property
    def num_corrupted(self) -> int:
        """Pulls since boot whose bytes failed their checksum."""
        return self._num_corrupted

    async def pull(self, moves: Sequence[Move]) -> Pulled:
        """Pull a wave's experts, a few at a time.

        Raises:
            TransferError: an expert could be had from no source; names each and its fault.
        """
        limit = asyncio.Semaphore(_MAX_PULLS)
        # Ranks that failed in this wave are asked last, so that one hung peer costs one timeout.
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
        return Pulled(
            payloads=tuple(payload for payload, _ in pulled),
            peer_bytes=num_peer * self._expert_bytes,
            checkpoint_bytes=(len(pulled) - num_peer) * self._expert_bytes,
        )

    async def close(self) -> None:
        """Drop the connections to peers."""
        for channel in self._channels.values():
            await channel.close(grace=None)
        self._channels.clear()

    async def _until_turn(self) -> None:
        """Wait until the next pull may begin, and book it."""
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._next_pull_s)
        self._next_pull_s = begin_s + self._pull_interval_s
        await asyncio.sleep(begin_s - now_s)

    async def _pull_one(self, move: Move, failed: set[int]) -> tuple[Tensor, Source]:
        faults = []
        for source in _in_order(move.sources, failed):
            try:
                async with asyncio.timeout(self._source_timeout_s):
                    payload = await self._read(source, move)
                await self._verify(payload, move)
            except (TransferError, NotHeldError) as error:
                fault = str(error)
            except TimeoutError:
                fault = f"no answer in {self._source_timeout_s:g} s"
                what = f"expert {move.expert} of layer {move.layer} from {self._name(source)}"
                self._waits.note(Wait.PULL, f"{what}: the next source was asked")
            else:
                return payload, source
            faults.append(f"{self._name(source)}: {fault}")
            _log.warning(
                "expert %d of layer %d not had from %s", move.expert, move.layer, faults[-1]
            )
            if isinstance(source, RankSource):
                failed.add(source.rank)
        raise TransferError(
            f"expert {move.expert} of layer {move.layer} could be had from no source "
            f"({'; '.join(faults)})"
        )

    async def _read(self, source: Source, move: Move) -> Tensor:
        if isinstance(source, CheckpointSource):
            try:
                return await asyncio.to_thread(
                    self._checkpoint.read_expert, move.layer, move.expert
                )
            except (OSError, ValueError) as error:
                raise TransferError(str(error)) from error
        if source.rank == self._rank and self._held is not None:
            return await asyncio.to_thread(self._held.read, layer=move.layer, expert=move.expert)
        return payload_from_bytes(await self._fetch(source.rank, move))

    async def _fetch(self, rank: int, move: Move) -> bytearray:
        if not 0 <= rank < len(self._peers):
            raise TransferError(f"there is no rank {rank} in epoch {self._epoch}")
        place = (rank, self._credentials.version())
        if place not in self._channels:
            self._channels[place] = self._dial(self._peers[rank].address)
        request = pb.FetchRequest(epoch=self._epoch, layer=move.layer, expert=move.expert)
        call = pb_grpc.ExpertTransferStub(self._channels[place]).Fetch(
            request, timeout=self._source_timeout_s, metadata=self._credentials.metadata()
        )
        data = bytearray()
        try:
            async for response in call:
                data += response.data
                if len(data) > self._expert_bytes:
                    raise TransferError(f"sent more than an expert's {self._expert_bytes} bytes")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            words = self._credentials.explain(error.details())
            raise TransferError(f"{error.code().name} {words}") from error
        finally:
            call.cancel()
        return data

    def _dial(self, address: str) -> grpc.aio.Channel:
        try:
            return self._credentials.worker_channel(address)
        except TrustError as error:
            raise TransferError(str(error)) from error

    async def _verify(self, payload: Tensor, move: Move) -> None:
        found = await asyncio.to_thread(checksum, payload)
        if found != move.checksum:
            self._num_corrupted += 1
            raise TransferError(
                f"corrupted: {payload.numel()} bytes with checksum {found.hex()}, "
                f"not {move.checksum.hex()}"
            )

    def _name(self, source: Source) -> str:
        if isinstance(source, CheckpointSource):
            return "checkpoint"
        known = 0 <= source.rank < len(self._peers)
        return f"rank {source.rank} ({self._peers[source.rank].worker if known else 'unknown'})"


def _in_order(sources: Iterable[Source], failed: set[int]) -> list[Source]:
    """Ranks as preferred, those that failed behind them, and always the checkpoint at the end."""
    ranks = [source for source in sources if isinstance(source, RankSource)]
    return [*sorted(ranks, key=lambda source: source.rank in failed), CheckpointSource()]

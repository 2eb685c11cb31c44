"""Experts travel over real gRPC; wrong, late or missing bytes are fetched elsewhere."""

import asyncio
import math
import threading
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest
import torch

from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.rank.errors import NotHeldError, TransferError
from equipoise.rank.transfer import CHUNK_BYTES, ExpertTransferService
from equipoise.rank.waits import Waits
from equipoise.trust.guard import anonymous
from equipoise.trust.identity import Caller, Identity, Role
from equipoise.wire.messages import Wait
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from equipoise_model.experts import checksum
from tests.support.expert_servers import served
from tests.support.worker_parts import join_epoch_of, puller_of


def opened(held, *, epoch=1):
    service = ExpertTransferService()
    service.open(held, epoch=epoch)
    return service


class Corrupting(ExpertTransferService):
    """Sends the right bytes with one bit flipped."""

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        class Flipping:
            abort, peer = context.abort, context.peer

            async def write(self, response):
                data = bytearray(response.data)
                data[len(data) // 2] ^= 1
                await context.write(pb.FetchResponse(data=bytes(data)))

        await super().Fetch(request, Flipping())


class Short(ExpertTransferService):
    """Sends the right bytes without the last one."""

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        class Cutting:
            abort, peer = context.abort, context.peer

            async def write(self, response):
                await context.write(pb.FetchResponse(data=response.data[:-1]))

        await super().Fetch(request, Cutting())


class Silent(worker_pb2_grpc.ExpertTransferServicer):
    """Takes calls and never answers."""

    def __init__(self):
        self.num_calls = 0
        self.num_cancelled = 0

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        self.num_calls += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1
        yield pb.FetchResponse()


class Endless(worker_pb2_grpc.ExpertTransferServicer):
    """Sends more bytes than any expert has."""

    async def Fetch(self, request, context):  # noqa: N802 - named by the contract
        while True:
            yield pb.FetchResponse(data=bytes(CHUNK_BYTES))


NO_WAITS = Waits({})


class NoCheckpoint:
    def read_expert(self, layer, expert):
        raise OSError("the disk is gone")


@pytest.fixture
def puller(rank_of_one):
    """The puller of rank 0, whose peers from rank 1 have these addresses."""
    core, held = rank_of_one()

    @asynccontextmanager
    async def build(
        *addresses, timeout_s=20.0, checkpoint=None, epoch=1, bytes_per_s=math.inf, waits=NO_WAITS
    ):
        one = puller_of(
            core,
            held,
            join_epoch_of("", *addresses, epoch=epoch),
            read_checkpoint=(checkpoint or core.checkpoint).read_expert,
            source_timeout_s=timeout_s,
            bytes_per_s=bytes_per_s,
            waits=waits,
        )
        yield one
        await one.close()

    return build


@pytest.fixture
def held(rank_of_one):
    """What another rank holds: all experts."""
    return rank_of_one()[1]


@pytest.fixture
def move(checkpoint):
    def build(expert, *ranks, layer=1):
        return Move(
            layer=layer,
            slot=3,
            expert=expert,
            checksum=checksum(checkpoint.read_expert(layer, expert)),
            sources=(*(RankSource(rank=rank) for rank in ranks), CheckpointSource()),
        )

    return build


async def test_pulled_experts_match_the_checkpoint(puller, held, move, checkpoint):
    async with served(opened(held)) as address, puller(address) as own:
        moves = [move(expert, 1, layer=layer) for layer in (0, 1) for expert in range(8)]
        pulled = await own.pull(moves)
    for one, payload in zip(moves, pulled.payloads, strict=True):
        assert payload.equal(checkpoint.read_expert(one.layer, one.expert))
    assert pulled.peer_bytes == 16 * pulled.payloads[0].numel()
    assert pulled.checkpoint_bytes == 0


async def test_no_moves_need_no_pull(puller):
    async with puller() as own:
        pulled = await own.pull([])
    assert pulled.payloads == ()
    assert pulled.peer_bytes == pulled.checkpoint_bytes == 0


async def test_a_rate_limit_spaces_pulls_by_their_bytes(puller, move, checkpoint, monkeypatch):
    waits = []

    async def note(delay_s):
        waits.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", note)
    async with puller(bytes_per_s=checkpoint.config.expert_bytes / 1000) as own:
        await own.pull([move(expert) for expert in range(3)])
    assert waits == [0, pytest.approx(1000, abs=100), pytest.approx(2000, abs=100)]


async def test_a_rank_copies_from_its_own_slots_without_a_call(puller, move, checkpoint):
    async with puller() as own:
        pulled = await own.pull([move(5, 0)])
    assert pulled.payloads[0].equal(checkpoint.read_expert(1, 5))
    assert pulled.peer_bytes > 0


async def test_corrupted_bytes_are_counted_and_fetched_elsewhere(
    puller, held, move, checkpoint, caplog
):
    corrupting = Corrupting()
    corrupting.open(held, epoch=1)
    async with served(corrupting) as bad, served(opened(held)) as good, puller(bad, good) as own:
        pulled = await own.pull([move(4, 1, 2)])
        assert own.num_corrupted == 1
    assert pulled.payloads[0].equal(checkpoint.read_expert(1, 4))
    assert pulled.checkpoint_bytes == 0
    assert "rank 1 (worker-1): corrupted" in caplog.text


async def test_a_peer_that_sent_wrong_bytes_is_told_and_no_other_one(puller, held, move):
    """One that sent too few bytes is not: its slot is no suspect."""
    suspected = {name: [] for name in ("corrupting", "short", "good")}
    corrupting, short, good = Corrupting(), Short(), ExpertTransferService()
    for name, service in zip(suspected, (corrupting, short, good), strict=True):
        service.open(held, epoch=1, suspect=lambda *what, name=name: suspected[name].append(what))
    async with (
        served(corrupting) as first,
        served(short) as second,
        served(good) as third,
        puller(first, second, third) as own,
    ):
        await own.pull([move(4, 1, 2, 3)])
        assert own.num_corrupted == 2
    assert suspected == {"corrupting": [(1, 4)], "short": [], "good": []}


async def test_a_silent_peer_costs_one_timeout_for_the_wave_and_its_calls_are_cancelled(
    puller, held, move
):
    silent, waits = Silent(), Waits({Wait.PULL: 5.0})
    async with served(silent) as slow, served(opened(held)) as good:
        async with puller(slow, good, timeout_s=5.0, waits=waits) as own:
            pulled = await own.pull([move(expert, 1, 2) for expert in range(8)])
        assert pulled.checkpoint_bytes == 0
        # Only the calls in flight when the first one timed out.
        assert 1 <= silent.num_calls <= 4
        (timeout,) = waits.all()
        assert 1 <= timeout.reached <= 4
        assert "from rank 1 (worker-1): tried the next source" in timeout.latest
    assert silent.num_cancelled == silent.num_calls


@pytest.mark.parametrize("epoch", [1, 2])
async def test_a_dead_peer_or_another_epoch_falls_back_to_the_checkpoint(
    puller, held, move, checkpoint, epoch
):
    async with (
        served(opened(held, epoch=9)) as other,
        puller("127.0.0.1:1", other, epoch=epoch) as own,
    ):
        pulled = await own.pull([move(2, 1, 2)])
    assert pulled.payloads[0].equal(checkpoint.read_expert(1, 2))
    assert pulled.checkpoint_bytes == pulled.payloads[0].numel()


async def test_a_peer_that_sends_too_much_is_cut_off(puller, move):
    async with served(Endless()) as address, puller(address, checkpoint=NoCheckpoint()) as own:
        with pytest.raises(TransferError, match="sent more than an expert's"):
            await own.pull([move(0, 1)])


async def test_when_all_sources_fail_each_is_named_with_its_fault(puller, held, move):
    corrupting = Corrupting()
    corrupting.open(held, epoch=1)
    async with (
        served(corrupting) as bad,
        puller("127.0.0.1:1", bad, checkpoint=NoCheckpoint()) as own,
    ):
        with pytest.raises(TransferError) as caught:
            await own.pull([move(0, 1, 2, 7)])
    said = str(caught.value)
    assert "expert 0 of layer 1" in said
    assert "rank 1 (worker-1): UNAVAILABLE" in said
    assert "rank 2 (worker-2): corrupted" in said
    assert "rank 7 (unknown): there is no rank 7" in said
    assert "checkpoint: the disk is gone" in said


async def test_a_checkpoint_that_differs_is_rejected_by_its_checksum(puller, checkpoint, move):
    class Other:
        def read_expert(self, layer, expert):
            return checkpoint.read_expert(layer, expert + 1)

    async with puller(checkpoint=Other()) as own:
        with pytest.raises(TransferError, match="checkpoint: corrupted"):
            await own.pull([move(0)])


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        ({"epoch": 2, "layer": 0, "expert": 0}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 1, "layer": 9, "expert": 0}, grpc.StatusCode.NOT_FOUND),
        ({"epoch": 1, "layer": 0, "expert": 99}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_an_expert_that_a_rank_does_not_hold_is_rejected(held, request_of, code):
    async with served(opened(held)) as address, grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.ExpertTransferStub(channel).Fetch(
            pb.FetchRequest(**request_of), timeout=20
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is code


async def test_without_a_rank_no_expert_is_served():
    async with (
        served(ExpertTransferService()) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = worker_pb2_grpc.ExpertTransferStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 0"):
            async for _ in stub.Fetch(pb.FetchRequest(epoch=1), timeout=60):
                pass


class Large:
    """Holds experts of many chunks, more than is buffered for a peer that does not read."""

    def read(self, *, layer, expert):
        return torch.full((64 * CHUNK_BYTES,), layer * 10 + expert, dtype=torch.uint8)


def by_name(context):
    """The caller whose certificate or token names the worker that metadata has here."""
    worker = dict(context.invocation_metadata())["worker"]
    identity = Identity(role=Role.WORKER, pool="tiny", worker=worker)
    return Caller(peer=context.peer(), identities=(identity,))


async def fetch_all(address, expert, *, worker="new"):
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.ExpertTransferStub(channel).Fetch(
            pb.FetchRequest(epoch=1, layer=0, expert=expert),
            timeout=20,
            metadata=(("worker", worker),),
        )
        return b"".join([response.data async for response in call])


@pytest.mark.parametrize("num_channels", [1, 8], ids=["one peer", "eight peers"])
async def test_peers_that_do_not_read_do_not_stop_transfers(num_channels):
    service = ExpertTransferService(write_timeout_s=1.0, caller=by_name)
    service.open(Large(), epoch=1)
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with served(service) as address:
        channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(num_channels)
        ]
        stubs = [worker_pb2_grpc.ExpertTransferStub(channel) for channel in channels]
        hung = [
            stubs[n % num_channels].Fetch(
                pb.FetchRequest(epoch=1), metadata=(("worker", f"hung-{n % num_channels}"),)
            )
            for n in range(16)
        ]
        for call in hung[:4]:
            await call.read()
        async with asyncio.timeout(60):
            for expert in (3, 4):
                data = await fetch_all(address, expert)
                assert data == bytes([expert]) * 64 * CHUNK_BYTES
        for call in hung:
            call.cancel()
        for channel in channels:
            await channel.close()
    assert num_channels == 1 or service.num_stalled >= 8, "all streams were taken"


@pytest.mark.parametrize("others", [by_name, anonymous], ids=["names", "machines"])
async def test_no_peer_takes_more_than_half_of_the_streams_by_more_connections(others):
    """Half is left for others: of another name, or on another machine if they have none."""

    def caller(context):
        is_other = dict(context.invocation_metadata())["worker"] == "other"
        found = others(context)
        return replace(found, peer="ipv4:192.0.2.7:40000") if is_other else found

    service = ExpertTransferService(write_timeout_s=600.0, stream_timeout_s=600.0, caller=caller)
    service.open(Large(), epoch=1)
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with served(service) as address, AsyncExitStack() as opened:
        for _ in range(4):
            channel = grpc.aio.insecure_channel(address, options=options)
            opened.push_async_callback(channel.close)
            stub = worker_pb2_grpc.ExpertTransferStub(channel)
            for _ in range(4):
                call = stub.Fetch(pb.FetchRequest(epoch=1), metadata=(("worker", "hung"),))
                opened.callback(call.cancel)
        await asyncio.sleep(0.2)  # They would be served first; that they are takes no event.
        async with asyncio.timeout(60):
            data = await fetch_all(address, 3, worker="other")
        assert data == bytes([3]) * 64 * CHUNK_BYTES
    assert service.num_stalled == 0


async def test_a_peer_that_reads_a_little_before_each_timeout_is_cut_off():
    service = ExpertTransferService(write_timeout_s=600.0, stream_timeout_s=0.5)
    service.open(Large(), epoch=1)
    async with served(service) as address, grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.ExpertTransferStub(channel).Fetch(pb.FetchRequest(epoch=1))
        num_read = 0
        async with asyncio.timeout(60):
            async for _ in call:
                num_read += 1
                await asyncio.sleep(0.2)
    assert num_read < 64
    assert service.num_stalled == 1


def test_reading_during_switches_returns_consistent_experts(
    rank_of_one, staged_from_checkpoint, random_layout, checkpoint
):
    core, held = rank_of_one()
    layouts = [random_layout(generation) for generation in range(2, 6)]
    staged = [staged_from_checkpoint(core, held.contents.layout, layout) for layout in layouts]
    expected = [checkpoint.read_expert(0, expert) for expert in range(8)]
    stop, wrong, reads = threading.Event(), [], [0]

    def read():
        while not stop.is_set():
            for expert in range(8):
                # A reader that meets one switch after another may give up, but not be wrong.
                with suppress(NotHeldError):
                    if not held.read(layer=0, expert=expert).equal(expected[expert]):
                        wrong.append(expert)
                    reads[0] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(50):
            for one in staged:
                held.switch(one)
    finally:
        stop.set()
        reader.join(60)
    assert not wrong
    assert reads[0] > 0


def test_a_reader_gives_up_if_the_slots_keep_changing(rank_of_one):
    _, held = rank_of_one()
    held._version += 1
    with pytest.raises(NotHeldError, match="switching"):
        held.read(layer=0, expert=0)


def test_nobody_reads_slots_that_a_failed_switch_left_behind(rank_of_one):
    _, held = rank_of_one()

    def fail():
        raise RuntimeError("the device is gone")

    def fill():
        with pytest.raises(NotHeldError, match="switching"):
            held.read(layer=0, expert=0)

    with pytest.raises(RuntimeError, match="gone"):
        held.replace(held.contents, rank=0, fill=fail)
    held.replace(held.contents, rank=0, fill=fill)
    held.read(layer=0, expert=0)

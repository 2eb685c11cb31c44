"""The relay in front of a real server: what it forwards, drops and records."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.cli.demo.fleet import free_address
from equipoise_api.v1 import worker_link_pb2 as link
from equipoise_api.v1 import worker_link_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.chaos.relay import Relay

WAIT_S = 120.0


class Echo(worker_link_pb2_grpc.WorkerLinkServicer):
    """Answers every heartbeat."""

    async def Connect(self, request_iterator, context):  # noqa: N802 - the contract's name
        async for request in request_iterator:
            ack = link.HeartbeatAck(sequence=request.heartbeat.sequence)
            await context.write(link.ConnectResponse(heartbeat_ack=ack))


class OneRank(worker_pb2_grpc.ExpertTransferServicer, worker_pb2_grpc.InferenceServicer):
    """Has one expert and makes one token."""

    async def Fetch(self, request, context):  # noqa: N802
        if request.expert:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        yield worker_pb2.FetchResponse(data=b"\0" * 64)

    async def Generate(self, request, context):  # noqa: N802
        yield worker_pb2.GenerateResponse(tokens=[5], generation=3, step=9, epoch=2)


class Latents(worker_pb2_grpc.LatentTransferServicer):
    """Has two blocks."""

    async def Fetch(self, request, context):  # noqa: N802
        for index in range(2):
            yield worker_pb2.LatentTransferFetchResponse(index=index, data=b"\0" * 64, checksum=7)


@pytest.fixture
async def relayed():
    """A relay, a channel to it, and what it observed."""
    server = grpc.aio.server()
    rank = OneRank()
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(Echo(), server)
    worker_pb2_grpc.add_ExpertTransferServicer_to_server(rank, server)
    worker_pb2_grpc.add_InferenceServicer_to_server(rank, server)
    worker_pb2_grpc.add_LatentTransferServicer_to_server(Latents(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    observed = []
    relay = Relay(free_address("127.0.0.1:0"), target=f"127.0.0.1:{port}", observer=observed.append)
    async with relay, grpc.aio.insecure_channel(relay.listen) as channel:
        yield relay, channel, observed
    await server.stop(0)


@asynccontextmanager
async def stream(channel, worker="worker-1"):
    call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect()
    await call.write(link.ConnectRequest(hello=link.Hello(worker=worker)))
    assert (await read(call)).heartbeat_ack.sequence == 0
    yield call
    call.cancel()


async def read(call):
    async with asyncio.timeout(WAIT_S):
        return await call.read()


async def beat(call, sequence):
    await call.write(link.ConnectRequest(heartbeat=link.Heartbeat(sequence=sequence)))


async def test_without_faults_everything_passes_in_order(relayed):
    _, channel, _ = relayed
    async with stream(channel) as call:
        for sequence in (1, 2, 3):
            await beat(call, sequence)
        assert [(await read(call)).heartbeat_ack.sequence for _ in range(3)] == [1, 2, 3]


async def test_messages_are_duplicated_both_ways(relayed):
    relay, channel, _ = relayed
    async with stream(channel) as call:
        relay.weather.doubled = 1.0
        await beat(call, 1)
        assert [(await read(call)).heartbeat_ack.sequence for _ in range(4)] == [1, 1, 1, 1]


async def test_messages_are_reordered_and_dropped(relayed):
    relay, channel, _ = relayed
    async with stream(channel) as call:
        relay.weather.swapped = 0.5
        for sequence in range(1, 41):
            await beat(call, sequence)
        got = [(await read(call)).heartbeat_ack.sequence for _ in range(30)]
        relay.clear()
        await beat(call, 41)  # Whatever is kept back follows the next one.
        got += [(await read(call)).heartbeat_ack.sequence for _ in range(11)]
        assert got != sorted(got)
        assert sorted(got) == list(range(1, 42))
        relay.weather.dropped = 1.0
        await beat(call, 50)
        relay.cut()
        while (message := await read_or_cut(call)) is not None:
            assert message.heartbeat_ack.sequence < 50


async def read_or_cut(call):
    try:
        return await read(call)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None


async def test_each_worker_has_its_own_faults(relayed):
    relay, channel, _ = relayed
    async with stream(channel, "worker-1") as one, stream(channel, "worker-2") as two:
        relay.weather_of["worker-2"] = type(relay.weather)(parted=True)
        await beat(two, 1)
        await beat(one, 1)
        assert (await read(one)).heartbeat_ack.sequence == 1
        relay.clear()
        assert (await read(two)).heartbeat_ack.sequence == 1
        relay.cut("worker-1")
        assert await read_or_cut(one) is None
        await beat(two, 2)
        assert (await read(two)).heartbeat_ack.sequence == 2


async def test_one_bit_of_an_expert_is_flipped_and_rejections_pass(relayed):
    relay, channel, _ = relayed
    stub = worker_pb2_grpc.ExpertTransferStub(channel)
    relay.weather.corrupted = 1.0
    (piece,) = [piece.data async for piece in stub.Fetch(worker_pb2.FetchRequest())]
    assert sum(byte.bit_count() for byte in piece) == 1
    with pytest.raises(grpc.aio.AioRpcError) as rejection:
        _ = [piece async for piece in stub.Fetch(worker_pb2.FetchRequest(expert=1))]
    assert rejection.value.code() is grpc.StatusCode.NOT_FOUND
    assert rejection.value.details() == "not here"


async def latents(channel):
    stub = worker_pb2_grpc.LatentTransferStub(channel)
    return [one async for one in stub.Fetch(worker_pb2.LatentTransferFetchRequest())]


async def test_latents_pass_and_are_counted(relayed):
    relay, channel, _ = relayed
    relay.weather.corrupted = 1.0  # Of experts only.
    assert [(one.index, one.data, one.checksum) for one in await latents(channel)] == [
        (0, b"\0" * 64, 7),
        (1, b"\0" * 64, 7),
    ]
    assert (relay.num_latents, relay.num_fetching) == (2, 0)


async def test_one_bit_of_latents_is_flipped(relayed):
    relay, channel, _ = relayed
    relay.weather.latents_corrupted = 1.0
    found = await latents(channel)
    assert [(one.index, one.checksum) for one in found] == [(0, 7), (1, 7)]
    assert [sum(byte.bit_count() for byte in one.data) for one in found] == [1, 1]


async def test_a_fetch_of_latents_is_cut(relayed):
    relay, channel, _ = relayed
    relay.weather.latents_cut = 1.0
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await latents(channel)
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert relay.num_latents == 0


async def test_latents_stall_until_the_fault_ends(relayed):
    relay, channel, _ = relayed
    relay.weather.latents_stalled = True
    fetching = asyncio.create_task(latents(channel))
    async with asyncio.timeout(WAIT_S):
        while not relay.num_fetching:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert relay.num_latents == 0
    relay.clear()
    assert len(await fetching) == 2
    assert relay.num_fetching == 0


async def test_tokens_are_recorded_with_their_step(relayed):
    _, channel, observed = relayed
    stub = worker_pb2_grpc.InferenceStub(channel)
    _ = [answer async for answer in stub.Generate(worker_pb2.GenerateRequest())]
    assert [(one.epoch, one.step, one.generation) for one in observed] == [(2, 9, 3)]

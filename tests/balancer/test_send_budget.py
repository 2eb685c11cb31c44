"""Workers that do not read: what is on its way to them is bounded, and their streams end."""

import asyncio
import logging
import struct
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.balancer.service import send_budget, worker_link
from equipoise.balancer.service.send_budget import SendBudget, SendBudgets
from equipoise.wire.convert import to_balancer
from equipoise_api.v1 import status_pb2, status_pb2_grpc
from tests.support.balancer_links import WAIT_S, is_serving, opened, served, until
from tests.support.grpc_streams import INITIAL_WINDOW_SIZE, GrpcConnection
from tests.support.raw_peer import DATA, END_STREAM, PREFACE, SETTINGS, frame

CONNECT = "/equipoise_api.v1.WorkerLink/Connect"
NUM_DEAF = 24


class DeafConnection(GrpcConnection):
    """Lets the server send no byte of a message, and answers its pings."""

    def connection_made(self, transport):
        self._transport = transport
        self.send(PREFACE + frame(SETTINGS, body=struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))


@asynccontextmanager
async def deaf_workers(address, hellos):
    """Workers that say Hello and read nothing; gives their connection."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        lambda: DeafConnection(CONNECT), host, int(port)
    )
    for hello in hellos:
        stream = connection.open(heard=print, ended=print)
        stream.write(to_balancer(hello).SerializeToString())
    try:
        yield connection
    finally:
        transport.abort()


@pytest.fixture
def budgets(monkeypatch):
    """The budgets of the balancer that is started afterwards."""
    budgets = SendBudgets()
    monkeypatch.setattr(worker_link, "SendBudgets", lambda: budgets)
    return budgets


@pytest.fixture
async def balancer(budgets, tmp_path):
    """Its address, and a stub of its Status service."""
    async with opened(tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        yield address, status_pb2_grpc.StatusStub(channel)


@pytest.fixture
def deaf_hellos(hello_of):
    return [hello_of(f"w-{number}", pool="deaf", num_ranks=NUM_DEAF) for number in range(NUM_DEAF)]


async def until_true(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of code that tells nobody
            await asyncio.sleep(0.01)


async def states(status):
    answer = await status.GetStatus(status_pb2.GetStatusRequest(pool="deaf"))
    return [rank.state for rank in answer.status.ranks]


async def test_what_is_on_its_way_to_workers_that_read_nothing_is_bounded(
    balancer, budgets, deaf_hellos, harness, monkeypatch
):
    address, status = balancer
    monkeypatch.setattr(send_budget, "MAX_BYTES", 10_000)
    async with deaf_workers(address, deaf_hellos):
        await until_true(lambda: budgets.of("deaf").num_bytes >= 10_000)
        assert await states(status) == ["connected"] * NUM_DEAF
        a_message = budgets.of("deaf").num_bytes // len(budgets.of("deaf")._writes)
        assert budgets.of("deaf").num_bytes < 10_000 + a_message < NUM_DEAF * a_message / 2
        async with grpc.aio.insecure_channel(address) as channel, served(channel, harness):
            pass  # Another pool has a budget of its own.
    await until_true(lambda: not budgets.of("deaf").num_bytes)


async def test_a_worker_that_reads_nothing_is_gone_after_a_while_and_named(
    balancer, budgets, deaf_hellos, monkeypatch, caplog
):
    address, _ = balancer
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker_link, "WRITE_TIMEOUT_S", 0.2)
    async with deaf_workers(address, deaf_hellos):
        await until_true(lambda: "w-7 is gone: it did not read a JoinEpoch of " in caplog.text)
        assert "bytes within 0.2 s" in caplog.text
        assert budgets.of("deaf").num_bytes, "gRPC keeps them while the connection lives"
    await until_true(lambda: not budgets.of("deaf").num_bytes)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_what_a_worker_that_ended_its_stream_has_not_read_counts_while_its_connection_lives(
    balancer, budgets, hello_of, monkeypatch, caplog
):
    address, _ = balancer
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker_link, "DRAIN_TIMEOUT_S", 0.1)
    alone = hello_of("w-0", pool="deaf", num_ranks=1, slots_per_rank=32)
    async with deaf_workers(address, [alone]) as connection:
        await until_true(lambda: budgets.of("deaf").num_bytes)
        connection.send(frame(DATA, flags=END_STREAM, stream=1))
        await until_true(lambda: "w-0 is gone: its stream ended" in caplog.text)
        assert budgets.of("deaf").num_bytes
    await until_true(lambda: not budgets.of("deaf").num_bytes)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_worker_that_is_rejected_and_reads_nothing_keeps_no_call(
    balancer, hello_of, monkeypatch
):
    address, _ = balancer
    monkeypatch.setattr(worker_link, "WRITE_TIMEOUT_S", 0.2)
    answered = []
    turn_away = worker_link._turn_away

    async def noted(context, rejection):
        try:
            await turn_away(context, rejection)
        finally:
            answered.append(rejection)

    monkeypatch.setattr(worker_link, "_turn_away", noted)
    async with deaf_workers(address, [hello_of("w-0", slots_per_rank=1)]):
        await until_true(lambda: answered)


async def test_workers_that_read_are_served_in_turn_however_small_the_budget_is(
    balancer, budgets, harness, monkeypatch
):
    address, status = balancer
    monkeypatch.setattr(send_budget, "MAX_BYTES", 1)
    async with grpc.aio.insecure_channel(address) as channel, served(channel, harness):
        await until(status, is_serving)
    assert not budgets.of("tiny").num_bytes


class Write:
    """A write that ends when it is told to."""

    def __init__(self, budget, num_bytes):
        self.ended = asyncio.get_running_loop().create_future()
        self.task = budget.begin(self._run(), num_bytes=num_bytes)

    async def _run(self):
        await self.ended


async def test_writers_begin_in_order_of_arrival_while_there_is_room(monkeypatch):
    monkeypatch.setattr(send_budget, "MAX_BYTES", 10)
    budget, begun = SendBudget(), []

    async def writer():
        async with budget.turn():
            begun.append(Write(budget, 6))

    writers = [asyncio.create_task(writer()) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for number in range(2, 5):
        await until_true(lambda wanted=number: len(begun) == wanted)
        assert budget.num_bytes == 12
        begun[number - 2].ended.set_result(None)
    await asyncio.gather(*writers)
    for write in begun[3:]:
        write.ended.set_result(None)
    await until_true(lambda: budget.is_idle)
    assert len(begun) == 5


async def test_a_writer_that_gives_up_leaves_its_turn_but_what_it_wrote_counts(monkeypatch):
    monkeypatch.setattr(send_budget, "MAX_BYTES", 10)
    budget = SendBudget()
    first = Write(budget, 10)

    async def waits():
        async with budget.turn():
            pass

    second, third = (asyncio.create_task(waits()) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert budget.num_bytes == 10
    assert not third.done()
    first.ended.set_exception(ConnectionError("its stream broke"))
    await third
    assert budget.is_idle


def test_a_budget_is_forgotten_once_all_was_read():
    budgets = SendBudgets()
    first = budgets.of("a")
    assert budgets.of("a") is first
    budgets.of("b")
    assert budgets.of("a") is not first

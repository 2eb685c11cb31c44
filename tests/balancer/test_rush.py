"""A fleet that connects at once, as after a power cut: each worker joins, or gets the reason."""

import asyncio

import pytest

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise.wire.seal import seal
from equipoise_api.v1 import worker_link_pb2
from tests.support.balancers import serving
from tests.support.grpc_streams import GrpcConnection

NUM_STREAMS = 2000
STREAMS_A_CONNECTION = 50
CONNECT = "/equipoise_api.v1.WorkerLink/Connect"


@pytest.fixture
async def port(tmp_path):
    """Where a balancer listens."""
    store = SqliteStore(tmp_path / "state.sqlite")
    async with serving(
        store,
        credentials=Credentials(),
        listen="127.0.0.1:0",
        policies=PolicyBook(Policy()),
        drain_timeout_s=0.0,
    ) as port:
        yield port
    await store.close()


async def test_none_of_thousands_of_streams_that_come_at_once_is_turned_away(port):
    answers, ended = [], []
    loop = asyncio.get_running_loop()
    nameless = seal(worker_link_pb2.ConnectRequest(heartbeat=worker_link_pb2.Heartbeat()))
    everybody = asyncio.Event()

    def note(where, what):
        where.append(what)
        if len(ended) == NUM_STREAMS:
            everybody.set()

    for _ in range(NUM_STREAMS // STREAMS_A_CONNECTION):
        _, connection = await loop.create_connection(
            lambda: GrpcConnection(CONNECT), "127.0.0.1", port
        )
        for _ in range(STREAMS_A_CONNECTION):
            stream = connection.open(
                heard=lambda data: note(answers, data), ended=lambda why: note(ended, why)
            )
            stream.write(nameless.SerializeToString())
    async with asyncio.timeout(60):
        await everybody.wait()
    assert len(answers) == NUM_STREAMS, "each got an answer"
    answer = worker_link_pb2.ConnectResponse.FromString(answers[0])
    assert "Hello" in answer.rejection.reason

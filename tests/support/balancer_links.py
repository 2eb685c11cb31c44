"""A real server on a free port with a real file, and scripted workers on real streams to it."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise.wire.balancer_messages import HeartbeatAck, JoinEpoch, Rejection
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise_api.v1 import status_pb2, worker_link_pb2_grpc
from tests.support.balancers import serving

WAIT_S = 120.0
POLICY = Policy(interval_s=0.3, min_assignments=100.0, report_interval_s=0.1)


@asynccontextmanager
async def opened(tmp_path, *, tls=None, accepted_keys=""):
    """host:port of a balancer; what it knows outlives it in `tmp_path`."""
    store = SqliteStore(tmp_path / "state.sqlite")
    try:
        async with serving(
            store,
            listen="127.0.0.1:0",
            credentials=Credentials(tls),
            accepted_keys=str(accepted_keys),
            policies=PolicyBook(POLICY),
            drain_timeout_s=1.0,
        ) as port:
            yield f"127.0.0.1:{port}"
    finally:
        await store.close()


class Link:
    """A scripted worker on a stream of its own."""

    def __init__(self, channel, worker, *, metadata=()) -> None:
        self.worker = worker
        self.call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect(metadata=metadata)
        self._writing = asyncio.Lock()  # gRPC ends a call that is written to while it writes.

    async def send(self, value) -> None:
        async with self._writing:
            await self.call.write(to_balancer(value))

    async def receive(self):
        """The next message, or None when the stream has ended."""
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        if message is grpc.aio.EOF:
            return None
        value = from_balancer(message, hello=self.worker.hello, running=self.worker.layout)
        if not isinstance(value, HeartbeatAck | Rejection):
            self.worker.take(value)
        return value

    async def receive_until(self, kind):
        while not isinstance(value := await self.receive(), kind):
            assert value is not None, f"the stream ended before {kind.__name__}"
        return value


@asynccontextmanager
async def linked(channel, workers):
    """Streams of workers that said Hello."""
    links = [Link(channel, worker) for worker in workers]
    try:
        for link in links:
            await link.send(link.worker.hello)
        yield links
    finally:
        for link in links:
            link.call.cancel()


@asynccontextmanager
async def served(channel, bench):
    """Streams of the bench's workers, all serving."""
    async with linked(channel, bench.workers.values()) as links:
        for link in links:
            await link.receive_until(JoinEpoch)
        for link in links:
            await link.send(link.worker.serving())
        yield sorted(links, key=lambda link: link.worker.rank)


@asynccontextmanager
async def reporting(links, load):
    """All links serve `load` and report it, inside the block. A report is never cut short: gRPC
    would cancel the whole call.
    """
    ended = asyncio.Event()

    async def report():
        while not ended.is_set():
            for link in links:
                link.worker.serve_traffic(load)
                await link.send(link.worker.report())
            await asyncio.sleep(POLICY.report_interval_s)

    reports = asyncio.create_task(report())
    try:
        yield
    finally:
        ended.set()
        await reports


async def until(status, condition):
    """The first status of the pool that the condition holds for."""
    watch = status.WatchStatus(status_pb2.WatchStatusRequest(min_interval_s=0.05))
    async with asyncio.timeout(WAIT_S):
        async for response in watch:
            if condition(response.status):
                watch.cancel()
                return response.status
    raise AssertionError("the watch ended")


def is_serving(pool):
    return pool.health == status_pb2.POOL_HEALTH_SERVING

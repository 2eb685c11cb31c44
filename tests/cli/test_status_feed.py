import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.cli.demo.fleet import free_address
from equipoise.cli.live.status_feed import StatusFeed
from equipoise_api.v1 import status_pb2, status_pb2_grpc

BOUND_S = 120.0


class Balancer(status_pb2_grpc.StatusServicer):
    """Sends its watchers the statuses that tests put in."""

    def __init__(self):
        self.statuses = asyncio.Queue()

    async def WatchStatus(self, request, context):  # noqa: N802 - the contract's name
        assert request.pool == "demo"
        while True:
            yield status_pb2.WatchStatusResponse(status=await self.statuses.get())


@asynccontextmanager
async def serving(balancer, address="127.0.0.1:0"):
    server = grpc.aio.server()
    status_pb2_grpc.add_StatusServicer_to_server(balancer, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def following(address):
    feed = StatusFeed(address, pool="demo")
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def status(revision: int, **fields) -> status_pb2.PoolStatus:
    return status_pb2.PoolStatus(pool="demo", revision=revision, **fields)


async def test_history_beyond_the_status_is_kept():
    balancer = Balancer()
    for number in (1, 2):
        balancer.statuses.put_nowait(
            status(
                number,
                windows=[status_pb2.WindowStatus(window=number, closed_unix_s=number)],
                switches=[status_pb2.SwitchStatus(generation=number)],
                last_decision=status_pb2.Decision(sequence=number),
            )
        )
    async with serving(balancer) as address, following(address) as feed:
        await feed.until(lambda status: status.revision == 2, timeout_s=BOUND_S)
    assert list(feed.windows) == [1.0, 2.0]
    assert list(feed.decisions) == list(feed.switches) == [1, 2]


async def test_a_condition_that_holds_already_is_not_waited_for():
    balancer = Balancer()
    balancer.statuses.put_nowait(status(1))
    async with serving(balancer) as address, following(address) as feed:
        await feed.until(lambda status: status.revision == 1, timeout_s=BOUND_S)
        again = await feed.until(lambda status: status.revision == 1, timeout_s=0)
    assert again.pool == "demo"


async def test_waiting_is_bounded():
    async with serving(Balancer()) as address, following(address) as feed:
        with pytest.raises(TimeoutError):
            await feed.until(lambda _: True, timeout_s=0.05)


async def test_a_balancer_that_went_away_is_asked_again_until_it_is_back(monkeypatch):
    monkeypatch.setattr("equipoise.cli.live.status_feed.RETRY_S", 0.02)
    address = free_address("127.0.0.1:0")
    async with following(address) as feed:
        for revision in (1, 2):
            balancer = Balancer()
            balancer.statuses.put_nowait(status(revision))
            async with serving(balancer, address):
                await feed.until(lambda status, r=revision: status.revision == r, timeout_s=BOUND_S)

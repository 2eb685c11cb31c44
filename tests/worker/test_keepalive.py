"""A machine that is gone without a word: the worker closes its end of the connection."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from equipoise.trust.credentials import Credentials
from equipoise.worker.core import ModelCore
from equipoise.worker.lifecycle import Worker
from equipoise.worker.location import find_location
from tests.support.frozen_link import frozen_link

BOUND_S = 15.0
"""What the options promise; the test allows a busy machine much more."""


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_connection_whose_other_end_is_gone_is_closed(settings, balancer, side):
    chosen = settings(balancer=balancer.address, worker="w-0")
    worker = Worker(chosen, core=ModelCore.load(chosen), location=await find_location(chosen))
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    link = await balancer.link()
    async with frozen_link(link.hello.address) as wire:
        dial = grpc.aio.insecure_channel if side == "server" else Credentials().worker_channel
        async with dial(wire.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=60)
            wire.freeze()
            closed = wire.closed_by_server if side == "server" else wire.closed_by_client
            await asyncio.wait_for(closed.wait(), BOUND_S + 45)
    stop.set()
    await asyncio.wait([task], timeout=60)

"""Workers' acknowledgements while thousands watch, and thousands of connections say nothing.

EQUIPOISE_WATCHERS and EQUIPOISE_IDLE set how many, EQUIPOISE_STREAMS how many watchers share a
connection: `EQUIPOISE_WATCHERS=10000 EQUIPOISE_IDLE=2000 make bench
ARGS=tests/balancer/test_watchers_benchmark.py`. Watchers read in this process.
"""

import asyncio
import os

import grpc
import pytest

from equipoise.telemetry.open_files import raise_open_files_limit
from equipoise_api.v1 import status_pb2, status_pb2_grpc
from tests.support.redis_server import free_port
from tests.support.scale import balancing, fleet, measured

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

NUM_WATCHERS = int(os.environ.get("EQUIPOISE_WATCHERS", "3000"))
NUM_IDLE = int(os.environ.get("EQUIPOISE_IDLE", "1000"))
STREAMS = int(os.environ.get("EQUIPOISE_STREAMS", "50"))
MAX_P99_S = 0.1
NUM_POOLS, NUM_RANKS = 2, 32
MEASURED_S = 15.0
POLICY = ("--report-interval-s=1", "--heartbeat-interval-s=1", "--report-timeout-s=60")


async def test_watchers_do_not_slow_acknowledgements(tmp_path, capsys):
    raise_open_files_limit()
    address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    counts = [0, 0]

    async def watch(stub, pool):
        async for _ in stub.WatchStatus(status_pb2.WatchStatusRequest(pool=pool)):
            counts[0] += 1

    async with (
        balancing(tmp_path, *POLICY, f"--metrics-listen={metrics}", address=address) as balancer,
        fleet(address, num_pools=NUM_POOLS, num_ranks=NUM_RANKS, num_processes=1) as ranks,
    ):
        await ranks.until("assigned", NUM_POOLS * NUM_RANKS)
        alone = await measured(balancer, ranks, seconds=MEASURED_S)
        idle = [await connected((address, metrics)[number % 2]) for number in range(NUM_IDLE)]
        own = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            grpc.aio.insecure_channel(address, options=own)
            for _ in range(-(-NUM_WATCHERS // STREAMS))
        ]
        watching = [
            asyncio.create_task(
                watch(
                    status_pb2_grpc.StatusStub(channels[number // STREAMS]),
                    f"pool-{number % NUM_POOLS:04d}",
                )
            )
            for number in range(NUM_WATCHERS)
        ]
        async with asyncio.timeout(120):
            while counts[0] < NUM_WATCHERS:  # noqa: ASYNC110 - a benchmark
                await asyncio.sleep(0.1)
        before = counts[0]
        watched = await measured(balancer, ranks, seconds=MEASURED_S)
        per_watcher = (counts[0] - before) / NUM_WATCHERS / MEASURED_S
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for channel in channels:
            await channel.close()
        for _, writer in idle:
            writer.close()
    with capsys.disabled():
        crowd = f"{NUM_WATCHERS} watchers, {NUM_IDLE} idle connections"
        for what, one in (("alone", alone), (crowd, watched)):
            print(
                f"\n{what}: acks {1000 * one.p50_s:.1f} ms (median), {1000 * one.p99_s:.1f} ms "
                f"(p99), {1000 * one.max_s:.0f} ms (worst); balancer {one.cores:.2f} cores",
                end="",
            )
        print(f"\neach watcher got {per_watcher:.2f} messages per second")
    assert watched.p99_s < MAX_P99_S


async def connected(address):
    """A connection that says nothing."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))

"""How long a pool waits for the event loop beside pools that take all they may.

The streams of a hostile pool always have a message, whose work takes 2 ms. A pool of good will has
one every 50 ms. Asserted is only that a pool gains nothing by having many streams.
"""

import asyncio
import statistics
import time

import pytest

from equipoise.balancer.loop_share import LoopShares

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(300)]

WORK_S = 0.002
INTERVAL_S = 0.05
MEASURED_S = 5.0
MOST_FOR_MANY_STREAMS = 3.0


def work(seconds):
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < seconds:
        pass


async def waited(*, num_pools, num_streams):
    """How long messages of good will waited, seconds each."""
    shares, loop, waits = LoopShares(), asyncio.get_running_loop(), []

    async def greedy(pool):
        while True:
            await asyncio.sleep(0)
            async with shares.of(pool).turn():
                work(WORK_S)

    streams = [
        asyncio.create_task(greedy(f"pool-{pool}"))
        for pool in range(num_pools)
        for _ in range(num_streams)
    ]
    until_s = loop.time() + MEASURED_S
    while loop.time() < until_s:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        async with shares.of("good").turn():
            waits.append(loop.time() - due_s)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return waits[2:]  # The first ones meet what pools may take at once.


def test_a_pool_delays_others_no_more_with_many_streams_than_with_one(capsys):
    medians = {}
    for num_pools, num_streams in ((0, 0), (1, 1), (1, 16), (2, 16), (4, 16), (8, 16)):
        waits = asyncio.run(waited(num_pools=num_pools, num_streams=num_streams))
        medians[num_pools, num_streams] = statistics.median(waits)
        with capsys.disabled():
            print(
                f"\n{num_pools} hostile pools x {num_streams} streams: others wait "
                f"{1e3 * statistics.median(waits):.1f} ms (median), {1e3 * max(waits):.1f} (worst)",
                end="",
            )
    assert medians[1, 16] <= MOST_FOR_MANY_STREAMS * medians[1, 1]

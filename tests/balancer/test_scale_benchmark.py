"""One balancer and 10,000 simulated ranks: how long reports, plans and pushes take, and memory.

A pool is 32 ranks of 58 layers x 9 slots, which is how DeepSeek-V3 is served for prefill: 256
experts and 32 redundant slots. EQUIPOISE_SCALE=POOLSxRANKS plays another fleet.

How long a report takes is measured from outside, by the answer to the heartbeat that follows it on
its stream, so the ways through both processes' event loops and the socket are counted as well. The
simulated ranks need a processor too; whoever has no more than the balancer's two measures both.
"""

import asyncio
import os
import time

import grpc
import pytest
from redis_server import free_port
from scale import Operator, balancing, fleet, measured

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

SCALE = os.environ.get("EQUIPOISE_SCALE", "313x32")
PROCESSES = 2
MEASURED_S = 30.0
INTERVAL_S = 60.0
POLICY = (
    "--report-interval-s=10",
    "--heartbeat-interval-s=10",
    "--silent-after-s=60",
    f"--interval-s={INTERVAL_S:g}",
    # All moves at once: the largest push there is.
    "--max-wave-bytes=100000000000",
    "--max-wave-moves=100000",
    "--stage-timeout-s=120",
    "--switch-timeout-s=120",
)


async def test_ten_thousand_ranks(tmp_path, capsys):
    num_pools, num_ranks = (int(part) for part in SCALE.split("x"))
    total = num_pools * num_ranks
    pools = [f"pool-{number:04d}" for number in range(num_pools)]
    address = f"127.0.0.1:{free_port()}"

    def say(words):
        with capsys.disabled():
            print(f"\n{words}", end="", flush=True)

    async with (
        balancing(tmp_path, *POLICY, address=address) as balancer,
        grpc.aio.insecure_channel(address) as channel,
    ):
        operator = Operator(channel)
        began_s = time.monotonic()
        async with fleet(
            address, num_pools=num_pools, num_ranks=num_ranks, num_processes=PROCESSES
        ) as ranks:
            assigned_s = await ranks.until("assigned", total) - began_s
            say(
                f"{total} ranks in {num_pools} pools: all have ranks after {assigned_s:.1f} s, "
                f"{ranks.count('turned away')} were turned away meanwhile"
            )
            await operator.pause(pools)
            # Until every pool has closed a window, without which nothing is planned.
            await asyncio.sleep(INTERVAL_S)
            quiet = await measured(balancer, ranks, seconds=MEASURED_S)
            say(f"reports: {_words(quiet)}")

            staged = ranks.count("staged")
            began_s = time.monotonic()
            await operator.rebalance(pools[:1])
            one_s = await ranks.until("staged", staged + num_ranks) - began_s
            say(f"a plan and its push to the {num_ranks} ranks of a pool: {one_s:.2f} s")

            staged = ranks.count("staged")
            began_s = time.monotonic()
            await operator.rebalance(pools[1:])
            all_s = await ranks.until("staged", staged + total - num_ranks) - began_s
            await ranks.until("switched", total)
            say(f"plans of all other pools at once and their pushes to all ranks: {all_s:.2f} s")

            planning = await measured(balancer, ranks, seconds=MEASURED_S)
            say(f"reports, while every pool is planned each {INTERVAL_S:g} s: {_words(planning)}")
            memory = balancer.memory("VmHWM")
            say(f"memory of the balancer: {memory / 2**20:.0f} MiB at most\n")
            assert not ranks.troubles, ranks.troubles[:3]
    assert memory < 2 * 2**30


def _words(ingest):
    return (
        f"{ingest.reports_per_s:.0f}/s, answered after {1000 * ingest.p50_s:.1f} ms (median), "
        f"{1000 * ingest.p99_s:.1f} ms (p99), {1000 * ingest.max_s:.0f} ms (worst), "
        f"{ingest.cores:.2f} cores"
    )

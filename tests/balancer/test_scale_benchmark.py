"""One balancer, thousands of simulated ranks: how long reports, plans and pushes take; memory.

A pool is 32 ranks of 58 layers x 9 slots, which is how DeepSeek-V3 is served for prefill: 256
experts and 32 redundant slots. EQUIPOISE_SCALE=POOLSxRANKS plays another fleet and
EQUIPOISE_SCALE_ALGORITHM=global plans by another algorithm, EQUIPOISE_SCALE_INTERVAL_S=120 more
seldom; docs/scale.md has the results.

How long a report takes is measured from outside, by the answer to the heartbeat that follows it on
its stream, so the ways through both processes' event loops and the socket are counted as well. The
simulated ranks need CPUs too: what they spent stands beside what the balancer did.
"""

import asyncio
import os
import time

import grpc
import pytest

from tests.support.redis_server import free_port
from tests.support.scale import Operator, balancing, fleet, measured

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

SCALE = os.environ.get("EQUIPOISE_SCALE", "40x32")
# What the published planner takes where expert groups divide over nodes, as these do.
ALGORITHM = os.environ.get("EQUIPOISE_SCALE_ALGORITHM", "hierarchical")
PROCESSES = 2
MEASURED_S = 10.0
INTERVAL_S = float(os.environ.get("EQUIPOISE_SCALE_INTERVAL_S", "10"))
POLICY = (
    "--report-interval-s=10",
    "--heartbeat-interval-s=10",
    "--report-timeout-s=60",
    f"--interval-s={INTERVAL_S:g}",
    # Every pool is planned after every interval, and moves on request only.
    "--min-gain=1",
    # Waves are as large as they are by default.
    f"--algorithm={ALGORITHM}",
    "--stage-timeout-s=120",
    "--switch-timeout-s=120",
)
MAX_BYTES_OF_RANK = 160 * 1024
MAX_BYTES = 400 * 2**20
"""A balancer without ranks, its planner included; 10,000 ranks on top are 2 GiB in all."""


async def test_thousands_of_ranks(tmp_path, capsys):
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
        began_s, cpu_s = time.monotonic(), balancer.cpu_s
        async with fleet(
            address, num_pools=num_pools, num_ranks=num_ranks, num_processes=PROCESSES
        ) as ranks:
            assigned_s = await ranks.until("assigned", total) - began_s
            say(
                f"{total} ranks in {num_pools} pools: all have ranks after {assigned_s:.1f} s "
                f"({balancer.cpu_s - cpu_s:.1f} s of CPU time; turned away and come again: "
                f"{ranks.count('turned away')})"
            )
            # Until every pool has closed a window, without which nothing is planned.
            await asyncio.sleep(INTERVAL_S + 1)
            say(f"reports: {_words(await measured(balancer, ranks, seconds=MEASURED_S))}")

            began_s, cpu_s = time.monotonic(), balancer.cpu_s
            await operator.rebalance(pools[:1])
            one_s = await ranks.until("pushed to", num_ranks) - began_s
            say(f"a plan and its push to the {num_ranks} ranks of a pool: {one_s:.2f} s")

            began_s, cpu_s = time.monotonic(), balancer.cpu_s
            await operator.rebalance(pools[1:])
            all_s = await ranks.until("pushed to", total) - began_s
            say(
                f"plans of all other pools at once and their pushes to all ranks: {all_s:.2f} s "
                f"({balancer.cpu_s - cpu_s:.2f} s of CPU time)"
            )
            waves = await measured(balancer, ranks, seconds=MEASURED_S)
            say(f"reports, while a wave follows the other in every pool: {_words(waves)}")
            most, planners = balancer.memory("VmHWM"), balancer.memory_of_planners
            say(
                f"memory of the balancer: {most / 2**20:.0f} MiB at most, and "
                f"{planners / 2**20:.0f} MiB of the processes that plan\n"
            )
            assert not ranks.troubles, ranks.troubles[:3]
    assert most + planners < MAX_BYTES + total * MAX_BYTES_OF_RANK


def _words(ingest):
    return (
        f"{ingest.reports_per_s:.0f}/s, answered after {1000 * ingest.p50_s:.1f} ms (median), "
        f"{1000 * ingest.p99_s:.1f} ms (p99), {1000 * ingest.max_s:.0f} ms (worst); the balancer "
        f"took {ingest.cores:.2f} cores, the ranks {ingest.cores_of_ranks:.2f}"
    )

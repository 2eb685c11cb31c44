"""A real balancer in this process with simulated ranks, on a thread of its own."""

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict

from equipoise.cli.live.status_feed import StatusFeed
from equipoise.planning.warm_up import warm_up
from tests.support.balancer_links import opened
from tests.support.simulated_fleet import FleetSettings

BOUND_S = 120.0


@contextmanager
def on_a_thread(context):
    """Enter an async context manager on another thread's event loop; gives its value."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(awaitable):
        return asyncio.run_coroutine_threadsafe(awaitable, loop).result(BOUND_S)

    try:
        value = run(context.__aenter__())
        try:
            yield value
        finally:
            run(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BOUND_S)
        loop.close()


@asynccontextmanager
async def running_fleet(folder):
    """host:port of a balancer whose pool has committed a second generation."""
    warm_up()  # Compiling the planner may take longer than a plan may.
    async with opened(folder) as address:
        settings = FleetSettings(
            address=address,
            first_pool=0,
            num_pools=1,
            num_ranks=4,
            num_layers=2,
            num_experts=8,
            slots_per_rank=3,
        )
        command = [sys.executable, "-m", "tests.support.simulated_fleet"]
        with subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [*command, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as ranks:
            try:
                feed = StatusFeed(address, pool="pool-0000")
                following = asyncio.create_task(feed.run())
                await feed.until(
                    lambda status: status.generation > 1 and status.windows_closed > 1,
                    timeout_s=BOUND_S,
                )
                following.cancel()
                yield address
            finally:
                ranks.stdin.close()
                await asyncio.to_thread(ranks.wait, BOUND_S)

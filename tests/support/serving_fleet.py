"""A fleet that serves over HTTP: a balancer, workers of the tiny checkpoint, a gateway."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from equipoise.cli.demo.fleet import free_address
from equipoise.cli.live.status_feed import StatusFeed
from equipoise_api.v1 import status_pb2
from tests.support.forked_commands import ForkedFleet

BOUND_S = 200.0


@dataclass(frozen=True, kw_only=True)
class ServingFleet:
    """Its processes, an HTTP client, and the status that its balancer shows."""

    fleet: ForkedFleet
    feed: StatusFeed
    client: httpx2.AsyncClient
    balancer: str
    """Address of the balancer."""

    workers: dict[str, list[str]]
    """The arguments of each worker, by name."""

    async def start_worker(self, name):
        await self.fleet.start(name, self.workers[name])

    async def until_serving(self, num_ranks):
        """Wait until so many ranks serve; a process that exits fails the test."""
        await unless_one_ends(
            self.fleet,
            self.feed.until(
                lambda status: status.health in SERVING and len(status.ranks) == num_ranks,
                timeout_s=BOUND_S,
            ),
        )

    async def until_idle(self):
        """Wait until no rank has requests."""
        await self.feed.until(
            lambda status: (
                not any(rank.active_requests or rank.queued_requests for rank in status.ranks)
            ),
            timeout_s=BOUND_S,
        )


SERVING = {status_pb2.POOL_HEALTH_SERVING, status_pb2.POOL_HEALTH_DEGRADED}
"""A pool with fewer ranks than intended serves, but is degraded."""


@asynccontextmanager
async def serving(folder, *options, num_ranks=2, gateway=()):
    """The fleet, with these options of its workers and of its gateway, as soon as it is ready."""
    balancer, address = free_address("127.0.0.1:0"), free_address("127.0.0.1:0")
    workers = {
        f"worker-{rank}": [
            "worker", f"--balancer={balancer}", f"--worker=worker-{rank}",
            f"--num-ranks={num_ranks}", "--slots-per-rank=32", *options,
        ]
        for rank in range(num_ranks)
    }  # fmt: skip
    async with ForkedFleet(folder) as fleet:
        await fleet.start(
            "balancer",
            ["balancer", f"--listen={balancer}", f"--store={folder / 'state.sqlite'}"],
        )
        await fleet.start(
            "gateway", ["gateway", f"--listen={address}", f"--balancer={balancer}", *gateway]
        )
        feed = StatusFeed(balancer, pool="default")
        following = asyncio.create_task(feed.run())
        client = httpx2.AsyncClient(base_url=f"http://{address}", timeout=BOUND_S)
        async with client:
            running = ServingFleet(
                fleet=fleet, feed=feed, client=client, balancer=balancer, workers=workers
            )
            for name in workers:
                await running.start_worker(name)
            await running.until_serving(num_ranks)
            yield running
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def unless_one_ends(fleet, wait):
    """Wait, and fail if a process exits."""
    waiting, watching = asyncio.ensure_future(wait), asyncio.create_task(fleet.watch())
    done, pending = await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()

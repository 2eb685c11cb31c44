"""`StatusFeed`: what a balancer tells about one pool, kept up to date.

Owns the newest status and what would scroll out of it (windows, decisions, switches). Only reads.
"""

import asyncio
from collections.abc import Callable

import grpc

from equipoise_api.v1 import status_pb2, status_pb2_grpc

RETRY_S = 0.5
"""A balancer that does not answer is asked again after this long."""


class StatusFeed:
    """Follows `WatchStatus` of one pool; a balancer that is away is asked again until it is back.

    `status` is None until the pool exists. `windows`, `decisions` and `switches` are everything
    heard so far, by closing time (numbers start again with the balancer), sequence and generation.
    """

    def __init__(self, address: str, *, pool: str) -> None:
        self.status: status_pb2.PoolStatus | None = None
        self.windows: dict[float, status_pb2.WindowStatus] = {}
        self.decisions: dict[int, status_pb2.Decision] = {}
        self.switches: dict[int, status_pb2.SwitchStatus] = {}
        self._address = address
        self._pool = pool
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            async with grpc.aio.insecure_channel(self._address) as channel:
                call = status_pb2_grpc.StatusStub(channel).WatchStatus(
                    status_pb2.WatchStatusRequest(pool=self._pool, min_interval_s=0.2)
                )
                try:
                    async for response in call:
                        await self._take(response.status)
                except grpc.aio.AioRpcError:
                    # Not there yet, or not any more: whoever needs an answer waits with a bound.
                    await asyncio.sleep(RETRY_S)

    async def until(
        self, condition: Callable[[status_pb2.PoolStatus], bool], *, timeout_s: float
    ) -> status_pb2.PoolStatus:
        """The first status from now on for which the condition holds.

        Raises:
            TimeoutError: there was none within the bound.
        """

        def holds() -> bool:
            return self.status is not None and condition(self.status)

        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(holds)
        assert self.status is not None
        return self.status

    async def _take(self, status: status_pb2.PoolStatus) -> None:
        self.windows.update({window.closed_unix_s: window for window in status.windows})
        self.switches.update({switch.generation: switch for switch in status.switches})
        if status.HasField("last_decision"):
            self.decisions[status.last_decision.sequence] = status.last_decision
        async with self._changed:
            self.status = status
            self._changed.notify_all()

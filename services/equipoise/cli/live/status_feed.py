"""`StatusFeed`: follows the status of one pool and keeps its history.

A status message holds the latest windows, decisions and switches only; the feed keeps them all.
"""

import asyncio
from collections.abc import Callable

import grpc

from equipoise_api.v1 import status_pb2, status_pb2_grpc

RETRY_S = 0.5
"""Delay before reconnecting to a balancer that does not answer."""


class StatusFeed:
    """Follows `WatchStatus` of one pool, and reconnects until cancelled."""

    def __init__(self, address: str, *, pool: str) -> None:
        self.status: status_pb2.PoolStatus | None = None
        """The latest status; None until the pool exists."""
        self.windows: dict[float, status_pb2.WindowStatus] = {}
        """By closing time; their numbers restart with the balancer."""
        self.decisions: dict[int, status_pb2.Decision] = {}
        """By sequence number."""
        self.switches: dict[int, status_pb2.SwitchStatus] = {}
        """By generation."""
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
                    # The balancer is starting or gone; `until` bounds the wait.
                    await asyncio.sleep(RETRY_S)

    async def until(
        self, condition: Callable[[status_pb2.PoolStatus], bool], *, timeout_s: float
    ) -> status_pb2.PoolStatus:
        """Wait for a status that meets the condition.

        Raises:
            TimeoutError: none did within `timeout_s`.
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

"""`WorkerHealth`: whether this worker takes requests, as gRPC health and /readyz show it."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from equipoise.telemetry.health import HealthChecks

LIVE = "live"
"""Health service name that reports SERVING while the process runs, with or without a rank."""

_SERVICES = ("", "equipoise_api.v1.ExpertTransfer", "equipoise_api.v1.Inference")


class WorkerHealth:
    """A worker's health; used from the event loop only."""

    def __init__(self) -> None:
        self._servicer = HealthChecks()
        self.takes_requests = False
        """Whether requests are accepted."""
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve_on(self, server: grpc.aio.Server) -> None:
        """Add the health service to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._servicer.set(LIVE, health_pb2.HealthCheckResponse.SERVING)

    def set_serving(self, serving: bool) -> None:
        """Report whether requests are accepted; ignored after `stop`."""
        self.takes_requests = serving and not self._stopping
        status = health_pb2.HealthCheckResponse
        task = asyncio.create_task(self._set(status.SERVING if serving else status.NOT_SERVING))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Report NOT_SERVING for all services from now on."""
        self._stopping, self.takes_requests = True, False
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in _SERVICES:
            await self._servicer.set(service, status)

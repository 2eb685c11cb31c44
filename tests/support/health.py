"""Waiting for the health that a gRPC port reports."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
POLL_S = 0.01


async def until_health(channel, service, status=SERVING, *, timeout_s):
    """Wait until a port that may not be open yet reports the status of a service."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if (await stub.Check(request, wait_for_ready=True)).status == status:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
            await asyncio.sleep(POLL_S)

"""`HealthChecks`: the gRPC health service as probes use it."""

from typing import NoReturn

import grpc
from grpc_health.v1 import health, health_pb2

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class HealthChecks(health.aio.HealthServicer):  # type: ignore[misc,name-defined]  # not in its stubs
    """Answers `Check`, but not `Watch`.

    grpcio's `Watch` writes with a lock held: a watcher that does not read would keep this process
    from changing its health, and from ending. Anybody may call this service.
    """

    async def Watch(  # noqa: N802 - named by the contract
        self, _: health_pb2.HealthCheckRequest, context: _Context
    ) -> NoReturn:
        """Reject the call with UNIMPLEMENTED."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not watched here: call Check")

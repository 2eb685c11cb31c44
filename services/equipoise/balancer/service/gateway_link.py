"""The GatewayLink service: takes what gateways count, for the status."""

from typing import Any

import grpc

from equipoise.balancer.errors import UnknownPoolError
from equipoise.balancer.seat import Seat
from equipoise.balancer.store.store import UnreadablePoolError
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise_api.v1 import gateway_link_pb2 as pb
from equipoise_api.v1 import gateway_link_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class GatewayLinkService(pb_grpc.GatewayLinkServicer):
    """Only the balancer that leads takes reports; a gateway reports to the next leader again."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def Report(  # noqa: N802 - the contract's name
        self, request: pb.GatewayLinkReportRequest, context: _Context
    ) -> pb.GatewayLinkReportResponse:
        """Take the counts of one gateway's process."""
        if self._seat.led is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._seat.elsewhere)
        try:
            gateway = checks.name("gateway_report", "boot_id", request.boot_id)
            count = checks.count("gateway_report", "poison_requests", request.poison_requests)
            self._seat.led.find(request.pool).count_poison(gateway, count)
        except InvalidMessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnknownPoolError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except UnreadablePoolError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        return pb.GatewayLinkReportResponse()

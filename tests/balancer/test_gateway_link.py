"""What gateways report to the real server."""

import grpc
import pytest

from equipoise.pool.counters import MAX_GATEWAYS, PoisonRequests
from equipoise_api.v1 import gateway_link_pb2 as pb
from equipoise_api.v1 import gateway_link_pb2_grpc, status_pb2
from tests.support.balancer_links import WAIT_S, served


async def test_the_status_counts_the_requests_that_gateways_rejected(channel, status, harness):
    report = gateway_link_pb2_grpc.GatewayLinkStub(channel).Report

    async def count():
        return (await status.GetStatus(status_pb2.GetStatusRequest(pool="tiny"))).status

    async with served(channel, harness):
        before = await count()
        assert before.poison_requests == 0
        for boot_id, rejected in (("one", 2), ("other", 1), ("one", 2), ("one", 3)):
            request = pb.GatewayLinkReportRequest(
                pool="tiny", boot_id=boot_id, poison_requests=rejected
            )
            await report(request, timeout=WAIT_S)
        after = await count()
        assert after.poison_requests == 4
        assert after.revision > before.revision, "watchers see it"
        for change, words in (({"pool": "big"}, "no pool 'big'"), ({"boot_id": ""}, "boot_id")):
            request = pb.GatewayLinkReportRequest(pool="tiny", boot_id="one", poison_requests=9)
            request.MergeFrom(pb.GatewayLinkReportRequest(**change))
            if change.get("boot_id") == "":
                request.ClearField("boot_id")
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await report(request, timeout=WAIT_S)
        assert (await count()).poison_requests == 4


def test_counts_never_shrink_and_need_bounded_memory():
    poison = PoisonRequests()
    for number in range(MAX_GATEWAYS + 9):
        poison.note(f"gateway-{number}", 1)
    poison.note(f"gateway-{number}", 0)
    assert poison.total == MAX_GATEWAYS + 9
    assert len(poison._by_gateway) == MAX_GATEWAYS

"""Status calls to the real server."""

import asyncio

import grpc
import pytest

from equipoise_api.v1 import status_pb2
from tests.support.balancer_links import WAIT_S, is_serving, linked, served, until


async def test_a_question_for_an_unknown_pool_names_those_there_are(channel, status, harness):
    with pytest.raises(grpc.aio.AioRpcError, match="no pool yet"):
        await status.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)
    async with served(channel, harness):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status.GetStatus(status_pb2.GetStatusRequest(pool="big"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "there is no pool 'big'; known pools: tiny"


async def test_pools_are_listed_and_a_name_is_needed_only_among_several(
    channel, status, harness, worker_of, hello_of
):
    other = worker_of(hello_of(pool="other"))
    async with served(channel, harness), linked(channel, [other]):
        pools = await until_two_pools(status)
        assert [(each.pool, each.num_ranks) for each in pools] == [("other", 4), ("tiny", 4)]
        with pytest.raises(grpc.aio.AioRpcError, match="name one of them: other, tiny"):
            await status.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)


async def until_two_pools(status):
    async with asyncio.timeout(WAIT_S):
        while True:
            pools = (await status.ListPools(status_pb2.ListPoolsRequest())).pools
            if len(pools) == 2:
                return pools


async def test_layouts_loads_and_decisions_can_be_read(channel, status, harness):
    async with served(channel, harness):
        await until(status, is_serving)
        layout = await status.GetLayout(status_pb2.GetLayoutRequest(), timeout=WAIT_S)
        assert layout.layout.generation == 1
        assert list(layout.node_of_rank) == ["node-0", "node-0", "node-1", "node-1"]
        loads = await status.GetLoads(status_pb2.GetLoadsRequest(), timeout=WAIT_S)
        assert len(loads.slow_assignments_per_s) == 3 * 32 * 8
        listed = await status.ListDecisions(status_pb2.ListDecisionsRequest(), timeout=WAIT_S)
        assert list(listed.decisions) == []
        with pytest.raises(grpc.aio.AioRpcError, match="no generation 77; its next is 2"):
            await status.GetLayout(status_pb2.GetLayoutRequest(generation=77), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1000, not 1001"):
            await status.ListDecisions(status_pb2.ListDecisionsRequest(limit=1001), timeout=WAIT_S)

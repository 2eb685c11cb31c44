"""Operators' requests to the real server."""

import asyncio

import grpc
import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.wire.balancer_messages import Stage
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc, worker_link_pb2
from tests.support.balancer_links import is_serving, opened, reporting, served, until


@pytest.fixture
def admin(channel):
    return admin_pb2_grpc.AdminStub(channel)


async def rejection(call):
    """Code and words of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_operators_pause_pin_and_free_a_pool_and_every_request_is_recorded(
    channel, status, admin, harness
):
    async with served(channel, harness):
        await until(status, is_serving)
        paused = await admin.Pause(admin_pb2.PauseRequest(reason="night"))
        assert paused.outcome.accepted
        again = await admin.Pause(admin_pb2.PauseRequest(pool="tiny"))
        assert not again.outcome.accepted
        assert "night" in again.outcome.reason
        pinned = await admin.Pin(admin_pb2.PinRequest(reason="a test"))
        assert pinned.outcome.accepted
        held = await until(status, lambda pool: pool.hold.pinned)
        assert held.hold.paused.endswith(": night")
        assert held.hold.at_pin
        assert held.hold.pinned_generation == 1
        assert (await admin.Unpin(admin_pb2.UnpinRequest())).outcome.accepted
        assert (await admin.Resume(admin_pb2.ResumeRequest())).outcome.accepted
        free = await until(status, lambda pool: not pool.HasField("hold"))
        listed = await admin.ListAudit(admin_pb2.ListAuditRequest())
    assert [entry.what for entry in listed.entries] == [
        "resume",
        "unpin",
        "pin the current layout (a test)",
        "pause",
        "pause (night)",
    ]
    assert [entry.sequence for entry in free.audit] == [5, 4, 3, 2, 1]
    assert [entry.accepted for entry in listed.entries] == [True, True, True, False, True]
    assert all("127.0.0.1" in entry.who for entry in listed.entries)


async def test_one_call_rebalances_many_pools_with_one_request_each(
    channel, status, admin, harness
):
    async with served(channel, harness):
        await until(status, is_serving)
        every = admin_pb2.RebalanceAllRequest(reason="a test", force=True)
        some = admin_pb2.RebalanceAllRequest(pools=["tiny", "tiny"])
        answers = [answer for asked in (every, some) async for answer in admin.RebalanceAll(asked)]
        listed = await admin.ListAudit(admin_pb2.ListAuditRequest())
        nobody = admin_pb2.RebalanceAllRequest(pools=["tiny", "gone"])
        code, words = await rejection(admin.RebalanceAll(nobody).read())
        many = admin_pb2.RebalanceAllRequest(pools=[f"p{number}" for number in range(1025)])
        crowd = await rejection(admin.RebalanceAll(many).read())
    assert [answer.pool for answer in answers] == ["tiny"] * 2
    assert all("no window" in answer.outcome.reason for answer in answers), answers
    assert [(entry.what, entry.sequence) for entry in listed.entries] == [
        ("rebalance", 2),
        ("rebalance with force (a test)", 1),
    ]
    assert {answer.outcome.sequence for answer in answers} == {1, 2}
    assert code is grpc.StatusCode.NOT_FOUND
    assert "there is no pool 'gone'" in words
    assert crowd == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "pools: 1025 names, but a balancer has at most 1024 pools",
    )


async def test_an_operator_rolls_a_pool_back_over_the_wire(channel, status, admin, harness, skewed):
    async with served(channel, harness) as links:
        await until(status, is_serving)
        code, words = await rejection(admin.Rollback(admin_pb2.RollbackRequest()))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "has adopted no plan yet" in words
        async with reporting(links, skewed(1)):
            for link in links:
                await link.receive_until(Stage)
            # No second plan, however long the rollout of the first takes.
            await admin.Pause(admin_pb2.PauseRequest())
            for link in links:
                await link.send(link.worker.answer_staged())
            for link in links:
                await link.send(link.worker.switch())
            await until(status, lambda pool: pool.generation == 2)
        code, words = await rejection(admin.Rollback(admin_pb2.RollbackRequest(generation=9)))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "no committed generation 9; those kept are: 1, 2" in words
        preview = await admin.Preview(
            admin_pb2.PreviewRequest(policy={"min_gain": 0.0}, algorithm="global")
        )
        assert preview.decision.base_generation == 2
        assert preview.decision.algorithm == "global"
        assert preview.layout.num_slots == 40
        await admin.Resume(admin_pb2.ResumeRequest())
        back = await admin.Rollback(admin_pb2.RollbackRequest(reason="it stutters"))
        assert back.outcome.accepted, back.outcome.reason
        assert back.outcome.generation == 3
        stages = await asyncio.gather(*(link.receive_until(Stage) for link in links))
        start = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
        assert all(stage.layout.same_placement(start) for stage in stages)
        for link in links:
            await link.send(link.worker.answer_staged())
        for link in links:
            await link.send(link.worker.switch())
        pool = await until(status, lambda pool: pool.generation == 3)
        assert pool.last_decision.algorithm == "rollback"
        assert "it stutters" in pool.hold.paused


@pytest.mark.parametrize(
    ("order", "code", "words"),
    [
        (lambda admin: admin.Pause(admin_pb2.PauseRequest(pool="x")), "NOT_FOUND", "no pool 'x'"),
        (
            lambda admin: admin.Preview(admin_pb2.PreviewRequest(policy={"gain": 1})),
            "INVALID_ARGUMENT",
            "a policy has no number 'gain'; known numbers: interval_s",
        ),
        (
            lambda admin: admin.Preview(admin_pb2.PreviewRequest(policy={"min_gain": 2})),
            "INVALID_ARGUMENT",
            "min_gain must be from 0 to 1, not 2",
        ),
        (
            lambda admin: admin.Preview(admin_pb2.PreviewRequest(algorithm="best")),
            "INVALID_ARGUMENT",
            "algorithm must be one of auto",
        ),
        (
            lambda admin: admin.Pin(
                admin_pb2.PinRequest(layout=worker_link_pb2.Layout(generation=1, num_layers=2**30))
            ),
            "INVALID_ARGUMENT",
            "pin: a layout must have 1 to 262144 slots over all layers",
        ),
        (
            lambda admin: admin.ListAudit(admin_pb2.ListAuditRequest(limit=9999)),
            "INVALID_ARGUMENT",
            "limit must be at most 1000",
        ),
    ],
)
async def test_invalid_requests_are_rejected_with_the_reason(
    channel, status, admin, harness, order, code, words
):
    async with served(channel, harness):
        await until(status, is_serving)
        assert (await rejection(order(admin)))[0] is grpc.StatusCode[code]
        assert words in (await rejection(order(admin)))[1]


async def test_holds_outlive_the_balancer(tmp_path, harness):
    async with opened(tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        status, admin = status_pb2_grpc.StatusStub(channel), admin_pb2_grpc.AdminStub(channel)
        async with served(channel, harness):
            await until(status, is_serving)
            await admin.Pin(admin_pb2.PinRequest(reason="keep it"))
            await admin.Pause(admin_pb2.PauseRequest(reason="and rest"))
    async with opened(tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        status = status_pb2_grpc.StatusStub(channel)
        kept = (await status.GetStatus(status_pb2.GetStatusRequest())).status
    assert kept.hold.pinned.endswith(": keep it")
    assert kept.hold.paused.endswith(": and rest")
    assert len(kept.audit) == 2

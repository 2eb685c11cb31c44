"""The real server on a free port, a real file, and workers that speak the real protocol."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from equipoise.balancer.errors import BalancerError
from equipoise.balancer.policy.book import PolicyBook
from equipoise.balancer.server import serving
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise.wire.messages import Assignment, HeartbeatAck, Rejection, Stage
from equipoise_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    worker_link_pb2,
    worker_link_pb2_grpc,
)

WAIT_S = 30.0
POLICY = Policy(interval_s=0.3, min_tokens=100.0, report_interval_s=0.1)


@pytest.fixture
async def balancer(tmp_path):
    """host:port of a balancer."""
    store = SqliteStore(tmp_path / "state.sqlite")
    async with serving(
        store, listen="127.0.0.1:0", policies=PolicyBook(POLICY), stop_grace_s=1.0
    ) as port:
        yield f"127.0.0.1:{port}"
    await store.close()


@pytest.fixture
async def channel(balancer):
    async with grpc.aio.insecure_channel(balancer) as channel:
        yield channel


@pytest.fixture
def status(channel):
    return status_pb2_grpc.StatusStub(channel)


class Link:
    """A scripted worker on a stream of its own."""

    def __init__(self, channel, worker) -> None:
        self.worker = worker
        self.call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect()

    async def send(self, value) -> None:
        await self.call.write(to_balancer(value))

    async def receive(self):
        """The next message, or None when the stream has ended."""
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        if message is grpc.aio.EOF:
            return None
        value = from_balancer(message, hello=self.worker.hello, running=self.worker.layout)
        if not isinstance(value, HeartbeatAck | Rejection):
            self.worker.take(value)
        return value

    async def receive_until(self, kind):
        while not isinstance(value := await self.receive(), kind):
            assert value is not None, f"the stream ended before {kind.__name__}"
        return value


@asynccontextmanager
async def linked(channel, workers):
    """Streams of workers that said Hello."""
    links = [Link(channel, worker) for worker in workers]
    try:
        for link in links:
            await link.send(link.worker.hello)
        yield links
    finally:
        for link in links:
            link.call.cancel()


@asynccontextmanager
async def served(channel, bench):
    """Streams of the bench's workers, all serving."""
    async with linked(channel, bench.workers.values()) as links:
        for link in links:
            await link.receive_until(Assignment)
        for link in links:
            await link.send(link.worker.serving())
        yield sorted(links, key=lambda link: link.worker.rank)


async def until(status, condition):
    """The first status of the pool that the condition holds for."""
    watch = status.WatchStatus(status_pb2.WatchStatusRequest(min_interval_s=0.05))
    async with asyncio.timeout(WAIT_S):
        async for response in watch:
            if condition(response.status):
                watch.cancel()
                return response.status
    raise AssertionError("the watch ended")


def is_serving(pool):
    return pool.health == status_pb2.POOL_HEALTH_SERVING


async def test_the_main_life_of_a_pool_over_the_wire(channel, status, bench, skewed):
    async with served(channel, bench) as links:
        assert (await until(status, is_serving)).generation == 1
        traffic = asyncio.create_task(report_forever(links, skewed(1)))
        try:
            stages = await asyncio.gather(*(link.receive_until(Stage) for link in links))
            assert {stage.layout.generation for stage in stages} == {2}
            for link in links:
                await link.send(link.worker.answer_staged())
            for link in links:
                await link.send(link.worker.switch())
            pool = await until(
                status, lambda pool: pool.generation == 2 and pool.windows[-1].generation == 2
            )
            listed = await status.ListDecisions(status_pb2.ListDecisionsRequest())
        finally:
            traffic.cancel()
            with suppress(asyncio.CancelledError):
                await traffic
    assert pool.rollouts_completed == 1
    assert pool.last_decision.reason
    assert any(decision.accepted for decision in listed.decisions)
    assert [decision.sequence for decision in listed.decisions][-1] == 1
    assert pool.switches[0].generation == 2
    assert pool.model.num_experts == 32
    assert [rank.rank for rank in pool.ranks] == [0, 1, 2, 3]
    assert sum(rank.load_share for rank in pool.ranks) == pytest.approx(1.0)
    assert {rank.state for rank in pool.ranks} == {"connected"}


async def report_forever(links, load):
    while True:
        for link in links:
            link.worker.serve_traffic(load)
            await link.send(link.worker.report())
        await asyncio.sleep(POLICY.report_interval_s)


@pytest.mark.parametrize(
    ("kind", "changes", "theirs", "ours"),
    [
        ("hello_checkpoint", {"checkpoint_fingerprint": "other"}, "other", "abc"),
        ("hello_kernels", {"kernels": "torch", "backends": ("model=torch",)}, "torch", "triton"),
    ],
)
async def test_a_worker_that_differs_is_turned_away_and_the_pool_goes_on(
    channel, status, bench, worker_of, hello_of, kind, changes, theirs, ours
):
    for worker in bench.workers.values():
        worker.hello = replace(worker.hello, backends=("gemm=triton|reference",))
    async with served(channel, bench):
        await until(status, is_serving)
        stray = worker_of(hello_of("stray", **changes))
        async with linked(channel, [stray]) as (link,):
            rejection = await link.receive()
            assert rejection.fatal
            assert theirs in rejection.reason
            assert ours in rejection.reason
            assert await link.receive() is None
        pool = await until(status, lambda pool: pool.refusals)
        assert [(each.kind, each.count) for each in pool.refusals] == [(kind, 1)]
        assert is_serving(pool)


async def test_a_bad_report_is_answered_and_counted_and_the_stream_lives_on(channel, status, bench):
    async with served(channel, bench) as links:
        await until(status, is_serving)
        link = links[2]
        report = link.worker.report()
        counters = np.ones((7, 10), dtype=np.uint64)
        await link.send(replace(report, load=replace(report.load, tokens=counters)))
        rejection = await link.receive_until(Rejection)
        assert not rejection.fatal
        assert link.worker.hello.worker in rejection.reason
        await link.send(link.worker.heartbeat(sequence=5))
        assert (await link.receive_until(HeartbeatAck)).sequence == 5
        pool = await until(status, lambda pool: pool.refusals)
        assert is_serving(pool)


async def test_a_heartbeat_that_goes_with_a_report_is_answered_whatever_the_report_is_worth(
    channel, status, bench
):
    async with served(channel, bench) as links:
        await until(status, is_serving)
        link = links[1]
        good = link.worker.report()
        await link.send(replace(good, heartbeat=link.worker.heartbeat(sequence=7)))
        assert (await link.receive_until(HeartbeatAck)).sequence == 7
        of_another = replace(good.load, rank=good.load.rank + 1)
        beat = link.worker.heartbeat(sequence=8)
        await link.send(replace(good, load=of_another, heartbeat=beat))
        assert (await link.receive_until(HeartbeatAck)).sequence == 8
        assert "its rank is" in (await link.receive_until(Rejection)).reason


async def test_a_stream_that_does_not_begin_with_hello_is_closed_with_words(channel):
    stream = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect()
    await stream.write(worker_link_pb2.ConnectRequest(heartbeat=worker_link_pb2.Heartbeat()))
    answer = await asyncio.wait_for(stream.read(), WAIT_S)
    assert answer.rejection.fatal
    assert "Hello" in answer.rejection.reason
    assert await asyncio.wait_for(stream.read(), WAIT_S) is grpc.aio.EOF


async def test_a_broken_stream_is_noticed_and_its_worker_comes_back(channel, status, bench):
    async with served(channel, bench) as links:
        await until(status, is_serving)
        links[1].call.cancel()
        pool = await until(status, lambda pool: not is_serving(pool))
        assert pool.ranks[1].state == "gone"
        assert "rank 1" in pool.health_reason
        returned = links[1].worker
        returned.hello, first = returned.reconnecting(), returned.hello
        async with linked(channel, [returned]) as (link,):
            returned.hello = first
            await link.receive_until(Assignment)
            assert (await until(status, is_serving)).epoch == 1


async def test_a_newer_stream_of_a_worker_ends_the_older(channel, status, bench):
    async with served(channel, bench) as links:
        await until(status, is_serving)
        older = links[0]
        older.worker.hello, first = older.worker.reconnecting(), older.worker.hello
        async with linked(channel, [older.worker]) as (newer,):
            older.worker.hello = first
            await newer.receive_until(Assignment)
            assert await older.receive() is None
            await until(status, is_serving)


async def test_stopping_lets_go_of_workers_and_watchers_at_once(tmp_path, bench):
    store = SqliteStore(tmp_path / "stopped.sqlite")
    # A grace that no test would survive waiting for.
    balancer = serving(
        store, listen="127.0.0.1:0", policies=PolicyBook(POLICY), stop_grace_s=3600.0
    )
    port = await balancer.__aenter__()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        status = status_pb2_grpc.StatusStub(channel)
        async with served(channel, bench) as links:
            await until(status, is_serving)
            watch = status.WatchStatus(status_pb2.WatchStatusRequest(min_interval_s=0.05))
            await watch.read()
            await asyncio.wait_for(balancer.__aexit__(None, None, None), WAIT_S)
            for link in links:
                assert await link.receive() is None
    await store.close()


# What anyone may ask -----------------------------------------------------------------------------


async def test_a_question_for_an_unknown_pool_names_those_there_are(channel, status, bench):
    with pytest.raises(grpc.aio.AioRpcError, match="no pool yet"):
        await status.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)
    async with served(channel, bench):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status.GetStatus(status_pb2.GetStatusRequest(pool="big"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "there is no pool 'big'; there are: tiny"


async def test_pools_are_listed_and_a_name_is_needed_only_among_several(
    channel, status, bench, worker_of, hello_of
):
    other = worker_of(hello_of(pool="other"))
    async with served(channel, bench), linked(channel, [other]):
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


async def test_layouts_loads_and_decisions_can_be_read(channel, status, bench):
    async with served(channel, bench):
        await until(status, is_serving)
        layout = await status.GetLayout(status_pb2.GetLayoutRequest(), timeout=WAIT_S)
        assert layout.layout.generation == 1
        assert list(layout.node_of_rank) == ["node-0", "node-0", "node-1", "node-1"]
        loads = await status.GetLoads(status_pb2.GetLoadsRequest(), timeout=WAIT_S)
        assert len(loads.slow_tokens_per_s) == 3 * 32 * 8
        listed = await status.ListDecisions(status_pb2.ListDecisionsRequest(), timeout=WAIT_S)
        assert list(listed.decisions) == []
        with pytest.raises(grpc.aio.AioRpcError, match="no generation 77; its next is 2"):
            await status.GetLayout(status_pb2.GetLayoutRequest(generation=77), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1000, not 1001"):
            await status.ListDecisions(status_pb2.ListDecisionsRequest(limit=1001), timeout=WAIT_S)


async def test_health_says_serving_for_every_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "equipoise_api.v1.WorkerLink", "equipoise_api.v1.Status"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stream = stub.ServerReflectionInfo(iter([asked]))
    answer = await asyncio.wait_for(stream.read(), WAIT_S)
    names = {service.name for service in answer.list_services_response.service}
    assert {"equipoise_api.v1.WorkerLink", "equipoise_api.v1.Status"} <= names


async def test_a_used_port_is_one_clear_sentence(balancer, tmp_path):
    store = SqliteStore(tmp_path / "other.sqlite")
    with pytest.raises(BalancerError, match=f"cannot listen on {balancer}"):
        async with serving(store, listen=balancer, policies=PolicyBook(POLICY), stop_grace_s=1.0):
            pass
    await store.close()


# Orders of operators ------------------------------------------------------------------------------


@pytest.fixture
def admin(channel):
    return admin_pb2_grpc.AdminStub(channel)


async def refusal(call):
    """Code and words of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_operators_pause_pin_and_free_a_pool_and_every_order_is_recorded(
    channel, status, admin, bench
):
    async with served(channel, bench):
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
        "pin what runs (a test)",
        "pause",
        "pause (night)",
    ]
    assert [entry.sequence for entry in free.audit] == [5, 4, 3, 2, 1]
    assert [entry.accepted for entry in listed.entries] == [True, True, True, False, True]
    assert all("127.0.0.1" in entry.who for entry in listed.entries)


async def test_an_operator_rolls_a_pool_back_over_the_wire(channel, status, admin, bench, skewed):
    async with served(channel, bench) as links:
        await until(status, is_serving)
        code, words = await refusal(admin.Rollback(admin_pb2.RollbackRequest()))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "has adopted no plan yet" in words
        traffic = asyncio.create_task(report_forever(links, skewed(1)))
        try:
            for link in links:
                await link.receive_until(Stage)
            for link in links:
                await link.send(link.worker.answer_staged())
            for link in links:
                await link.send(link.worker.switch())
            await until(status, lambda pool: pool.generation == 2)
        finally:
            traffic.cancel()
            with suppress(asyncio.CancelledError):
                await traffic
        code, words = await refusal(admin.Rollback(admin_pb2.RollbackRequest(generation=9)))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "no committed generation 9; those kept are: 1, 2" in words
        preview = await admin.Preview(
            admin_pb2.PreviewRequest(policy={"min_gain": 0.0}, algorithm="global")
        )
        assert preview.decision.base_generation == 2
        assert preview.decision.algorithm == "global"
        assert preview.layout.num_slots == 40
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
            "a policy has no number 'gain'; there are: interval_s",
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
            "pin: a layout has from 1 to 2^20 cells",
        ),
        (
            lambda admin: admin.ListAudit(admin_pb2.ListAuditRequest(limit=9999)),
            "INVALID_ARGUMENT",
            "limit must be at most 1000",
        ),
    ],
)
async def test_orders_that_make_no_sense_are_refused_in_words(
    channel, status, admin, bench, order, code, words
):
    async with served(channel, bench):
        await until(status, is_serving)
        assert (await refusal(order(admin)))[0] is grpc.StatusCode[code]
        assert words in (await refusal(order(admin)))[1]


async def test_what_operators_ordered_outlives_the_balancer(tmp_path, bench):
    path = tmp_path / "kept.sqlite"
    for life in (1, 2):
        store = SqliteStore(path)
        async with (
            serving(
                store, listen="127.0.0.1:0", policies=PolicyBook(POLICY), stop_grace_s=1.0
            ) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            status = status_pb2_grpc.StatusStub(channel)
            if life == 1:
                async with served(channel, bench):
                    await until(status, is_serving)
                    admin = admin_pb2_grpc.AdminStub(channel)
                    await admin.Pin(admin_pb2.PinRequest(reason="keep it"))
                    await admin.Pause(admin_pb2.PauseRequest(reason="and rest"))
            else:
                answer = await status.GetStatus(status_pb2.GetStatusRequest())
                assert answer.status.hold.pinned.endswith(": keep it")
                assert answer.status.hold.paused.endswith(": and rest")
                assert len(answer.status.audit) == 2
        await store.close()

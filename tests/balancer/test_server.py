"""The server's port from its opening to its end, and the life of a pool over it."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from equipoise.balancer.errors import BalancerError
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from equipoise.wire.balancer_messages import Stage
from equipoise_api.v1 import status_pb2, status_pb2_grpc
from tests.support.balancer_links import POLICY, WAIT_S, is_serving, reporting, served, until
from tests.support.balancers import serving


async def test_the_main_life_of_a_pool_over_the_wire(channel, status, harness, skewed):
    async with served(channel, harness) as links:
        assert (await until(status, is_serving)).generation == 1
        async with reporting(links, skewed(1)):
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
    assert pool.rollouts_completed == 1
    assert pool.last_decision.reason
    assert any(decision.accepted for decision in listed.decisions)
    assert [decision.sequence for decision in listed.decisions][-1] == 1
    assert pool.switches[0].generation == 2
    assert pool.model.num_experts == 32
    assert [rank.rank for rank in pool.ranks] == [0, 1, 2, 3]
    assert sum(rank.load_share for rank in pool.ranks) == pytest.approx(1.0)
    assert {rank.state for rank in pool.ranks} == {"connected"}


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


async def test_a_used_port_is_one_clear_sentence(address, tmp_path):
    store = SqliteStore(tmp_path / "other.sqlite")
    with pytest.raises(BalancerError, match=f"cannot listen on {address}"):
        async with serving(
            store,
            credentials=Credentials(),
            listen=address,
            policies=PolicyBook(POLICY),
            drain_timeout_s=1.0,
        ):
            pass
    await store.close()


async def test_stopping_lets_go_of_workers_and_watchers_at_once(tmp_path, harness):
    store = SqliteStore(tmp_path / "stopped.sqlite")
    # A grace that no test would survive waiting for.
    balancer = serving(
        store,
        credentials=Credentials(),
        listen="127.0.0.1:0",
        policies=PolicyBook(POLICY),
        drain_timeout_s=3600.0,
    )
    port = await balancer.__aenter__()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        status = status_pb2_grpc.StatusStub(channel)
        async with served(channel, harness) as links:
            await until(status, is_serving)
            watch = status.WatchStatus(status_pb2.WatchStatusRequest(min_interval_s=0.05))
            await watch.read()
            await asyncio.wait_for(balancer.__aexit__(None, None, None), WAIT_S)
            for link in links:
                assert await link.receive() is None
    await store.close()

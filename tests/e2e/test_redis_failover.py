"""A Redis primary is parted from its replica, which is promoted, amid a rollout of real workers.

The balancer that leads stays with the old primary, the other one reaches the new one, and the
workers reach both.
"""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from redis import Redis

from equipoise.balancer.store.redis_store import RedisStore
from equipoise.cli.demo.fleet import free_address
from equipoise.cli.live.status_feed import StatusFeed
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.support.real_pool import (
    BOUND_S,
    SERVING,
    Pool,
    check_tokens,
    mirrored,
    under_load,
    undisturbed_tokens,
)
from tests.support.redis_replica import promote, replicated, takes_no_write, until
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.e2e

NAMES = ("worker-0", "worker-1")
REQUIRED = {"min-replicas-to-write": 1, "min-replicas-max-lag": 3}
WAITS = f"--store-wait-s={BOUND_S:g}"
LOOK_S = 0.1
ANSWER_S = 10.0
"""A balancer waits for its store for less."""


class Meanings:
    """What balancers have said that each number stands for."""

    def __init__(self) -> None:
        self.of_generation, self.of_epoch = defaultdict(set), defaultdict(set)

    async def ask(self, address):
        """Ask a balancer again and again, also while it does not lead."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    layout = (await stub.GetLayout(status_pb2.GetLayoutRequest())).layout
                    self.of_generation[layout.generation].add(layout.expert_of_slot)
                    status = (await stub.GetStatus(status_pb2.GetStatusRequest())).status
                    if workers := tuple(rank.worker for rank in status.ranks):
                        self.of_epoch[status.epoch].add(workers)
                await asyncio.sleep(LOOK_S)

    def check(self):
        for meanings in (self.of_generation, self.of_epoch):
            assert len(meanings) >= 1
            assert {number: one for number, one in meanings.items() if len(one) > 1} == {}


@asynccontextmanager
async def meanings_told_by(*addresses):
    meanings = Meanings()
    asking = [asyncio.create_task(meanings.ask(address)) for address in addresses]
    try:
        yield meanings
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert all(task.cancelled() for task in asking)


async def request(address, name, message):
    """What a balancer answers to an operator; None if it does not carry out the request."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await getattr(admin_pb2_grpc.AdminStub(channel), name)(
                message, timeout=ANSWER_S
            )
        except grpc.aio.AioRpcError:
            return None
    return answer.outcome if answer.outcome.accepted else None


async def test_nothing_has_two_meanings_when_a_leader_is_left_with_the_old_primary(tmp_path):
    undisturbed = undisturbed_tokens()
    pool = Pool(tmp_path, num_ranks=2, slots_per_rank=20)
    old, new = pool.address, free_address("127.0.0.1:0")
    feed = StatusFeed(new, pool="default")
    async with (
        replicated(tmp_path / "redis", **REQUIRED) as (primary, link, replica),
        TcpProxy(primary.port) as store_of_old,
        TcpProxy(primary.port) as store_of_new,
        pool.fleet,
        asyncio.TaskGroup() as following,
    ):
        feeds = [following.create_task(one.run()) for one in (pool.feed, feed)]
        await pool.start_balancer(f"--store={at(store_of_old)}", WAITS)
        for name in NAMES:
            await pool.start_worker(name, f"--balancer={old},{new}")
        first = await pool.serving(*NAMES)
        other = [
            "balancer",
            f"--listen={new}",
            f"--store={at(store_of_new)}",
            WAITS,
            "--interval-s=2",
        ]
        await pool.fleet.start("other", other)
        follows = f"follows the leader at {old}"
        await feed.until(lambda status: follows in status.health_reason, timeout_s=BOUND_S)
        term = await highest_term(primary)

        async with under_load(first) as traffic, meanings_told_by(old, new) as meanings:
            pin = admin_pb2.PinRequest(reason="amid it", layout=mirrored(await pool.layout()))
            assert await request(old, "Pin", pin)
            link.hold()
            fail_over(store_of_new, replica)
            await until(lambda: takes_no_write(primary))
            pause = admin_pb2.PauseRequest(reason="on the wrong side")
            assert await request(old, "Pause", pause) is None
            promote(replica)
            led = await feed.until(
                lambda status: status.health in SERVING and "follows" not in status.health_reason,
                timeout_s=BOUND_S,
            )
            assert await request(old, "Pause", pause) is None
            wanted = mirrored(await layout_at(new))
            assert await request(new, "Pin", admin_pb2.PinRequest(reason="after", layout=wanted))
            pinned = await feed.until(
                lambda status: (
                    status.hold.at_pin
                    and "after" in status.hold.pinned
                    and not status.HasField("rollout")
                ),
                timeout_s=BOUND_S,
            )
            assert pinned.epoch == first.epoch, "the ranks went on"
            assert pinned.generation > led.generation >= first.generation
            with Redis.from_url(primary.url) as client:
                client.replicaof("127.0.0.1", replica.port)
            fail_over(store_of_old, replica)
            points = f"follows the leader at {new}"
            healed = await pool.until(lambda status: points in status.health_reason)
            assert healed.generation == pinned.generation
            await traffic.until_finished(6)
            for one in (old, new):
                assert (await layout_at(one)).expert_of_slot == wanted.expert_of_slot
        assert await highest_term(replica) > term
        for task in feeds:
            task.cancel()
    meanings.check()
    check_tokens(traffic, undisturbed)


def at(proxy):
    return f"redis://127.0.0.1:{proxy.port}/0"


def fail_over(address, server):
    """An address leads to another server from now on."""
    address.redirect(server.port)
    address.drop()


async def layout_at(address):
    """The committed layout, as a balancer reports it."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = status_pb2_grpc.StatusStub(channel)
        request = status_pb2.GetLayoutRequest()
        return (await stub.GetLayout(request, timeout=BOUND_S, wait_for_ready=True)).layout


async def highest_term(server):
    store = RedisStore(server.url, timeout_s=BOUND_S)
    try:
        return await store.highest_term()
    finally:
        await store.close()

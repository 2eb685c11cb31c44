"""The gateway follows its balancers, and serves without them."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from equipoise.gateway import watch
from equipoise.gateway.rank_load import RankState
from equipoise.gateway.rank_table import RankTable
from equipoise.gateway.watch import follow, ranks_of_status
from equipoise.settings.address import parse_address
from equipoise.trust.credentials import Credentials
from equipoise_api.v1 import gateway_link_pb2, gateway_link_pb2_grpc, status_pb2_grpc
from equipoise_api.v1 import status_pb2 as pb
from tests.support.limits import variants
from tests.support.scripted_ranks import BOUND_S


class FakeBalancer(status_pb2_grpc.StatusServicer, gateway_link_pb2_grpc.GatewayLinkServicer):
    """Sends the statuses that a test puts in, until it puts in None, and notes reports."""

    def __init__(self):
        self.reports = asyncio.Queue()
        self.statuses = asyncio.Queue()
        self.watches = asyncio.Queue()

    async def WatchStatus(self, request, context):  # noqa: N802 - named by the contract
        self.watches.put_nowait(request)
        while (status := await self.statuses.get()) is not None:
            await context.write(pb.WatchStatusResponse(status=status))

    async def Report(self, request, _context):  # noqa: N802
        self.reports.put_nowait(request)
        return gateway_link_pb2.GatewayLinkReportResponse()


@asynccontextmanager
async def sending(balancer, address="127.0.0.1:0"):
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    status_pb2_grpc.add_StatusServicer_to_server(balancer, server)
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(balancer, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def rank(number, address=None, *, state="connected", **more):
    return pb.RankStatus(
        rank=number,
        worker=f"worker-{number}",
        address=address or f"127.0.0.1:{7100 + number}",
        state=state,
        **more,
    )


def status(*ranks):
    return pb.PoolStatus(pool="default", ranks=ranks)


class Heard(RankTable):
    """Notes each update."""

    def __init__(self):
        super().__init__(max_queued=8, clock=asyncio.get_running_loop().time)
        self.news = asyncio.Queue()

    def update(self, infos):
        super().update(infos)
        self.news.put_nowait({rank.name: rank.state for rank in self.loads()})

    async def next(self):
        return await asyncio.wait_for(self.news.get(), BOUND_S)


@asynccontextmanager
async def following(*balancers, **counts):
    ranks = Heard()
    task = asyncio.create_task(
        follow(balancers, pool="default", ranks=ranks, credentials=Credentials(), **counts)
    )
    try:
        yield ranks
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_connected_ranks_are_open_and_silent_ones_doubtful():
    infos = ranks_of_status(
        status(rank(0), rank(1, state="silent"), rank(2, state="gone"), rank(3, state="leaving"))
    )
    assert [one.state for one in infos] == [
        RankState.OPEN, RankState.DOUBTFUL, RankState.DOUBTFUL, RankState.CLOSED,
    ]  # fmt: skip


def test_a_ranks_work_counts_active_and_queued_requests():
    (rank_info,) = ranks_of_status(
        status(rank(0, active_requests=3, queued_requests=2, tokens_processed=77))
    )
    assert (rank_info.name, rank_info.num_requests, rank_info.report) == ("worker-0", 5, 77)


def test_a_ranks_cache_size_and_use_are_read():
    (rank_info,) = ranks_of_status(status(rank(0, cache_tokens=4096, cache_tokens_used=48)))
    assert (rank_info.kv_tokens_total, rank_info.kv_tokens_used) == (4096, 48)


def test_what_a_rank_has_to_read_is_read():
    (rank_info,) = ranks_of_status(
        status(
            rank(
                0,
                max_requests=128,
                pending_prompt_tokens=5000,
                pending_prompt_pairs=12_500_000,
                parity_tokens=14_245,
                boot_id="boot-7",
            )
        )
    )
    assert (rank_info.max_requests, rank_info.pending_tokens) == (128, 5000)
    assert (rank_info.pending_pairs, rank_info.parity_tokens) == (12_500_000, 14_245)
    assert rank_info.boot_id == "boot-7"


@pytest.mark.parametrize("address", ["nowhere", "a b:1", "host:0", "host:99999"])
def test_a_rank_with_an_invalid_address_is_left_out(address):
    assert [one.name for one in ranks_of_status(status(rank(0, address), rank(1)))] == ["worker-1"]


def test_no_status_at_its_limits_passes_as_nonsense():
    known = rank(0, cache_tokens=4096, cache_tokens_used=48)
    for name, changed in variants(status(known)):
        for one in ranks_of_status(changed):
            assert 1 <= len(one.name) <= 253, name
            assert one.name.isprintable(), name
            assert parse_address(one.address), name


async def test_every_change_reaches_the_rank_table():
    balancer = FakeBalancer()
    async with sending(balancer) as address, following(address) as ranks:
        balancer.statuses.put_nowait(status(rank(0), rank(1)))
        assert await ranks.next() == {"worker-0": RankState.OPEN, "worker-1": RankState.OPEN}
        balancer.statuses.put_nowait(status(rank(0), rank(1, state="gone")))
        assert await ranks.next() == {"worker-0": RankState.OPEN, "worker-1": RankState.DOUBTFUL}
        assert (await balancer.watches.get()).pool == "default"


async def test_a_stream_that_ends_is_opened_again():
    balancer = FakeBalancer()
    async with sending(balancer) as address, following(address) as ranks:
        balancer.statuses.put_nowait(status(rank(0)))
        await ranks.next()
        balancer.statuses.put_nowait(None)
        balancer.statuses.put_nowait(status(rank(0), rank(1)))
        assert len(await ranks.next()) == 2


async def test_each_balancer_is_told_how_many_requests_were_rejected_as_poison():
    first, second, count = FakeBalancer(), FakeBalancer(), 0

    async def told(balancer):
        report = await asyncio.wait_for(balancer.reports.get(), BOUND_S)
        assert report.pool == "default"
        return report.boot_id, report.poison_requests

    async with (
        sending(first) as one,
        sending(second) as other,
        following(one, other, num_poison=lambda: count) as ranks,
    ):
        first.statuses.put_nowait(status(rank(0)))
        await ranks.next()
        count = 2
        for _ in range(2):
            first.statuses.put_nowait(status(rank(0)))
            await ranks.next()
        boot_id, heard = await told(first)
        assert heard == 2
        first.statuses.put_nowait(None)
        second.statuses.put_nowait(status(rank(0)))
        assert await told(second) == (boot_id, 2)
        assert first.reports.empty(), "what has not changed is not told again"


async def test_a_balancer_that_takes_no_reports_is_followed():
    balancer = FakeBalancer()
    balancer.Report = None
    async with sending(balancer) as address, following(address, num_poison=lambda: 1) as ranks:
        for _ in range(3):
            balancer.statuses.put_nowait(status(rank(0)))
            await ranks.next()
        assert balancer.watches.qsize() == 1


async def test_an_unreachable_balancer_is_retried():
    balancer = FakeBalancer()
    async with sending(balancer) as address:
        pass
    balancer.statuses.put_nowait(status(rank(0)))
    async with following(address) as ranks, sending(balancer, address):
        assert await ranks.next() == {"worker-0": RankState.OPEN}


async def test_the_next_balancer_is_tried_when_one_is_down():
    away, here = FakeBalancer(), FakeBalancer()
    here.statuses.put_nowait(status(rank(0)))
    async with sending(away) as gone:
        pass
    async with sending(here) as address, following(gone, address) as ranks:
        assert await ranks.next() == {"worker-0": RankState.OPEN}


async def test_a_silent_balancer_is_left_for_the_next_one(monkeypatch):
    monkeypatch.setattr(watch, "SILENCE_S", 0.1)
    silent, here = FakeBalancer(), FakeBalancer()
    here.statuses.put_nowait(status(rank(0)))
    async with (
        sending(silent) as first,
        sending(here) as second,
        following(first, second) as ranks,
    ):
        assert await ranks.next() == {"worker-0": RankState.OPEN}
    assert not silent.watches.empty()


async def test_a_follower_is_left_for_the_leader_whatever_it_sends():
    follower, leader = FakeBalancer(), FakeBalancer()
    # The decisions it reads are news, again and again; the ranks are the leader's to know.
    follower.statuses.put_nowait(status())
    leader.statuses.put_nowait(status(rank(0)))
    async with (
        sending(follower) as first,
        sending(leader) as second,
        following(first, second) as ranks,
    ):
        assert await ranks.next() == {"worker-0": RankState.OPEN}
    assert not follower.watches.empty()


async def test_the_last_known_ranks_serve_without_a_balancer(run_gateway, fleet):
    balancer = FakeBalancer()
    balancer.statuses.put_nowait(
        status(*(rank(number, address) for number, address in enumerate(fleet.addresses)))
    )
    async with sending(balancer) as address, run_gateway(balancer=(address,)) as gateway:
        assert (await gateway.post(prompt="hello")).status_code == 200
        balancer.statuses.put_nowait(status())
        balancer.statuses.put_nowait(None)
        await asyncio.wait_for(balancer.watches.get(), BOUND_S)
        await asyncio.wait_for(balancer.watches.get(), BOUND_S)
        assert (await gateway.post(prompt="hello")).status_code == 200


async def test_a_rank_that_is_leaving_gets_no_new_request(run_gateway, fleet):
    balancer = FakeBalancer()
    first, second = fleet.addresses
    balancer.statuses.put_nowait(status(rank(0, first, state="leaving"), rank(1, second)))
    async with sending(balancer) as address, run_gateway(balancer=(address,)) as gateway:
        for _ in range(4):
            assert (await gateway.post(prompt="hello")).status_code == 200
    assert (len(fleet.ranks[0].requests), len(fleet.ranks[1].requests)) == (0, 4)

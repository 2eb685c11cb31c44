"""`equipoise status` against a balancer with scripted answers."""

import asyncio
import io
import json
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from rich.console import Console

from equipoise.balancer.service.status import pool_status
from equipoise.cli.live.client import LEADER_METADATA, BalancerRejectedError, watch_leader
from equipoise.cli.live.settings import StatusSettings
from equipoise.cli.live.status import EXIT_NOT_ALL_SERVE, Picture, run
from equipoise.cli.live.view import status_line
from equipoise.planning.policy import Policy
from equipoise.settings.errors import InvalidSettingsError
from equipoise.trust.credentials import Credentials
from equipoise.wire.plain import as_json
from equipoise_api.v1 import status_pb2 as pb
from equipoise_api.v1 import status_pb2_grpc
from tests.support.frozen_link import frozen_link
from tests.support.pool_harness import PoolHarness, skewed_load

BOUND_S = 60.0


class Balancer(status_pb2_grpc.StatusServicer):
    """Knows the pools in `pools`; watchers hear of a change by `tell`."""

    def __init__(self):
        self.pools = {}
        self.unreadable = {}
        self.leader = ""
        self.decisions = []
        self.store_fault = ""
        self.not_ready = ""
        self.changed = asyncio.Condition()

    async def tell(self, status):
        async with self.changed:
            self.pools[status.pool] = status
            self.changed.notify_all()

    async def ListPools(self, request, context):  # noqa: N802 - gRPC's name
        if self.leader:
            context.set_trailing_metadata(((LEADER_METADATA, self.leader),))
        return pb.ListPoolsResponse(
            not_ready=self.not_ready,
            pools=[
                pb.PoolSummary(pool=name, health=status.health, ranks_serving=3, num_ranks=4)
                for name, status in sorted(self.pools.items())
            ]
            + [
                pb.PoolSummary(pool=name, health=pb.POOL_HEALTH_DEGRADED, unreadable=reason)
                for name, reason in self.unreadable.items()
            ],
        )

    async def GetStatus(self, request, context):  # noqa: N802 - gRPC's name
        return pb.GetStatusResponse(status=await self._pool(request.pool, context))

    async def ListDecisions(self, request, context):  # noqa: N802 - gRPC's name
        await self._pool(request.pool, context)
        if self.store_fault:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.store_fault)
        return pb.ListDecisionsResponse(decisions=self.decisions[: request.limit])

    async def WatchStatus(self, request, context):  # noqa: N802 - gRPC's name
        revision = None
        while True:
            status = await self._pool(request.pool, context)
            if status.revision != revision:
                yield pb.WatchStatusResponse(status=status)
                revision = status.revision
            async with self.changed:
                await self.changed.wait_for(
                    lambda sent=status: self.pools[sent.pool].revision != sent.revision
                )

    async def _pool(self, name, context):
        if not name and len(self.pools) == 1:
            (name,) = self.pools
        if name not in self.pools:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no pool {name!r}, only: decode")
        return self.pools[name]


@pytest.fixture
def balancer():
    return Balancer()


@pytest.fixture
def pool_without_a_slow_worker():
    """The status of a pool that continues without a slow worker, and that worker's name."""
    policy = Policy(
        interval_s=10.0,
        min_assignments=100.0,
        slow_worker_action="exclude",
        slow_worker_probation_s=60.0,
    )
    harness = PoolHarness(policy=policy)
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=11)
    harness.serve()
    slow = harness.ranks[2]
    slow.busy_us_a_step *= 5
    harness.run_traffic(skewed_load(1), seconds=30)
    harness.tick()
    assert harness.pool.roster.num_ranks == 3
    return pool_status(harness.pool, now=harness.now), slow.hello.worker


async def start(balancer, listen="127.0.0.1:0"):
    server = grpc.aio.server()
    status_pb2_grpc.add_StatusServicer_to_server(balancer, server)
    port = server.add_insecure_port(listen)
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture
async def address(balancer):
    server, address = await start(balancer)
    yield address
    await server.stop(None)


def a_pool(name="decode", *, health=pb.POOL_HEALTH_SERVING, revision=1):
    return pb.PoolStatus(pool=name, health=health, generation=2**40, revision=revision)


async def look(address, **settings):
    """Run the command once, off the loop that serves it."""
    return await asyncio.to_thread(run, StatusSettings(address=address, **settings))


async def test_the_only_pool_is_shown_without_naming_it(balancer, address, capsys):
    await balancer.tell(a_pool())
    assert await look(address) == 0
    assert "pool decode  serving" in capsys.readouterr().out


async def test_a_pipe_gets_whole_lines_and_no_frame(balancer, address, capsys):
    pool = a_pool()
    worker, reason = "w" * 200, "long words " * 30 + "end"
    pool.ranks.add(rank=0, worker=worker, node="n" * 120, state="connected")
    pool.last_decision.CopyFrom(pb.Decision(sequence=1, reason=reason))
    await balancer.tell(pool)
    balancer.decisions = [pool.last_decision]
    assert await look(address) == 0
    out = capsys.readouterr().out
    assert not set(out) & set("│╭╮╰╯─…")
    assert any(worker in line and "n" * 120 in line for line in out.splitlines())
    assert any(reason in line for line in out.splitlines())
    assert all(line == line.rstrip() for line in out.splitlines())


async def test_the_latest_decisions_are_shown_with_their_reasons(balancer, address, capsys):
    await balancer.tell(a_pool())
    balancer.decisions = [
        pb.Decision(sequence=number, reason=f"because of {number}") for number in (9, 8)
    ]
    await look(address)
    out = capsys.readouterr().out
    assert out.index("because of 9") < out.index("because of 8")


async def test_a_worker_excluded_for_being_slow_is_named_with_the_time_of_its_return(
    balancer, address, capsys, pool_without_a_slow_worker
):
    pool, worker = pool_without_a_slow_worker
    await balancer.tell(pool)
    assert await look(address) == EXIT_NOT_ALL_SERVE
    reason = (
        f"{worker} gets no rank: it was slow in epoch 1 (rank 2 takes 2.1 times as long to compute "
        "a step as the median rank, in 3 consecutive windows); it may return at 00:18:10 UTC"
    )
    assert reason in " ".join(capsys.readouterr().out.split())
    await look(address, pool=pool.pool, json=True)
    (shown,) = json.loads(capsys.readouterr().out)["pools"]
    assert reason in shown["health_reason"]


async def test_reached_bounds_are_shown(balancer, address, capsys):
    pool = a_pool()
    pool.timeouts.add(name="stage", timeout_s=30.0, reached=2, latest="rank 3 did not stage")
    pool.timeouts.add(name="report", timeout_s=15.0)
    await balancer.tell(pool)
    await look(address)
    out = capsys.readouterr().out
    assert "2 x stage, 30 s: rank 3 did not stage" in out
    assert "report" not in out


async def test_a_pool_that_cannot_be_read_is_shown_with_the_reason_beside_the_others(
    balancer, address, capsys
):
    await balancer.tell(a_pool())
    balancer.unreadable["torn"] = "pool torn cannot be read: restore its keys"
    assert await look(address) == EXIT_NOT_ALL_SERVE
    assert "pool torn cannot be read: restore its keys" in capsys.readouterr().out
    assert await look(address, json=True) == EXIT_NOT_ALL_SERVE
    first, second = json.loads(capsys.readouterr().out)["pools"]
    assert (first["pool"], first["health"]) == ("decode", "serving")
    assert (second["pool"], second["health"]) == ("torn", "degraded")
    assert second["health_reason"] == "pool torn cannot be read: restore its keys"


async def test_the_exit_status_shows_whether_all_ranks_serve(balancer, address):
    await balancer.tell(a_pool(health=pb.POOL_HEALTH_DEGRADED))
    assert await look(address) == EXIT_NOT_ALL_SERVE
    assert await look(address, pool="decode", json=True) == EXIT_NOT_ALL_SERVE


async def test_many_pools_are_listed_and_one_can_be_chosen(balancer, address, capsys):
    await balancer.tell(a_pool("decode"))
    await balancer.tell(a_pool("prefill", health=pb.POOL_HEALTH_WAITING))
    assert await look(address) == EXIT_NOT_ALL_SERVE
    out = capsys.readouterr().out
    assert "decode" in out
    assert "prefill" in out
    assert "3/4" in out
    assert await look(address, pool="decode") == 0
    assert "prefill" not in capsys.readouterr().out
    await look(address, json=True)
    pools = json.loads(capsys.readouterr().out)["pools"]
    assert [(pool["pool"], pool["health"]) for pool in pools] == [
        ("decode", "serving"),
        ("prefill", "waiting"),
    ]


async def test_json_has_one_shape_whatever_the_number_of_pools(balancer, address, capsys):
    assert await look(address, json=True) == EXIT_NOT_ALL_SERVE
    assert json.loads(capsys.readouterr().out) == {"pools": []}
    await balancer.tell(a_pool("decode"))
    shapes = []
    for settings in ({}, {"pool": "decode"}):
        assert await look(address, json=True, **settings) == 0
        shapes.append(json.loads(capsys.readouterr().out))
    await balancer.tell(a_pool("prefill"))
    assert await look(address, json=True) == 0
    both = json.loads(capsys.readouterr().out)
    assert shapes[0] == shapes[1] == {"pools": both["pools"][:1]}
    assert set(both["pools"][0]) == set(both["pools"][1]) == set(as_json(a_pool()))


async def test_the_status_is_shown_although_the_store_cannot_be_read(balancer, address, capsys):
    pool = a_pool()
    pool.last_decision.CopyFrom(pb.Decision(sequence=9, reason="because of 9"))
    await balancer.tell(pool)
    balancer.store_fault = "redis:6379 cannot be reached"
    assert await look(address) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "pool decode serving" in out
    assert "because of 9" in out
    assert "earlier decisions cannot be read" in out
    assert "redis:6379 cannot be reached" in out


async def test_a_follower_is_asked_only_who_leads(balancer, address):
    await balancer.tell(a_pool())
    follower = Balancer()
    follower.leader = address
    server, follower_address = await start(follower)
    assert await look(follower_address) == 0
    follower.leader = "127.0.0.1:1"  # A leader out of reach leaves the follower's own word.
    assert await look(follower_address, timeout_s=0.5) == EXIT_NOT_ALL_SERVE
    await server.stop(None)


async def test_a_balancer_without_a_pool_is_reported(balancer, address, capsys):
    assert await look(address) == EXIT_NOT_ALL_SERVE
    assert "has no pool yet: no worker has connected" in capsys.readouterr().out
    balancer.not_ready = "policy p.yaml: line 3: intervall: unknown field"
    assert await look(address) == EXIT_NOT_ALL_SERVE
    reason = "not ready: policy p.yaml: line 3: intervall: unknown field"
    assert reason in capsys.readouterr().out


async def test_a_rejected_policy_and_one_that_pauses_are_shown(balancer, address, capsys):
    pool = a_pool()
    pool.policy.hash = "0123456789ab"
    pool.policy.rejection = "policy p.yaml: line 3: intervall: unknown field"
    pool.policy.is_paused = True
    await balancer.tell(pool)
    await look(address)
    out = capsys.readouterr().out
    for shown in (out, status_line(pool)):
        assert "paused by the policy" in shown
        assert "policy 0123456789ab stays in force" in shown
        assert "line 3: intervall: unknown field" in shown


async def test_json_has_every_field_in_plain_values(balancer, address, capsys):
    await balancer.tell(a_pool())
    assert await look(address, json=True) == 0
    (status,) = json.loads(capsys.readouterr().out)["pools"]
    assert status.keys() == {field.name for field in pb.PoolStatus.DESCRIPTOR.fields}
    assert status["generation"] == 2**40
    assert status["health"] == "serving"
    assert status["rollout"] is None
    assert status["ranks"] == []


def test_json_keeps_nested_values_and_has_no_nan():
    status = a_pool()
    status.ranks.add(rank=1, worker="w", load_share=0.25)
    status.rollout.staged_ranks.extend([0, 2])
    status.balancedness = float("nan")
    plain = as_json(status)
    assert plain["ranks"][0]["load_share"] == 0.25
    assert plain["rollout"]["staged_ranks"] == [0, 2]
    assert plain["balancedness"] is None
    json.dumps(plain, allow_nan=False)


async def test_an_unknown_pool_shows_the_balancers_message(balancer, address):
    await balancer.tell(a_pool())
    with pytest.raises(BalancerRejectedError, match="no pool 'other', only: decode"):
        await look(address, pool="other")
    with pytest.raises(BalancerRejectedError, match="no pool 'other'"):
        await look(address, pool="other", watch=True)


async def test_a_missing_balancer_is_reported_with_the_remedy():
    with pytest.raises(
        BalancerRejectedError, match=r"no balancer answers at 127.0.0.1:9: start one with"
    ):
        await look("127.0.0.1:9")


async def test_a_balancer_that_never_answers_times_out(balancer, address):
    class Hung(Balancer):
        async def ListPools(self, request, context):  # noqa: N802 - gRPC's name
            await asyncio.Event().wait()

    server, hung = await start(Hung())
    with pytest.raises(BalancerRejectedError, match="no balancer answers"):
        await look(hung, timeout_s=0.05)
    await server.stop(None)


async def revisions(watcher):
    """Those of the pools in the next line, which has the shape of a status that is not watched."""
    return [pool["revision"] for pool in json.loads(await watcher.stdout.readline())["pools"]]


async def test_watching_survives_a_restart_until_ctrl_c(balancer, address):
    server, own = await start(balancer)
    await balancer.tell(a_pool(revision=1))
    watcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "equipoise.cli.main", "status", "--address", own),
        *("--watch", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(BOUND_S):
        assert await revisions(watcher) == [1]
        await balancer.tell(a_pool(revision=2))
        assert await revisions(watcher) == [2]
        await server.stop(None)
        # gRPC may have something to say about the goodbye, before us.
        while b"no balancer answers" not in (line := await watcher.stderr.readline()):
            assert line
        successor = Balancer()
        await successor.tell(a_pool(revision=3))
        server, _ = await start(successor, listen=own)
        assert await revisions(watcher) == [3]
        watcher.send_signal(signal.SIGINT)
        out, err = await watcher.communicate()
    await server.stop(None)
    assert watcher.returncode == 130
    assert out == b""
    assert b"Traceback" not in err


class SeenError(Exception):
    """The test has seen what it waits for."""


@asynccontextmanager
async def watching(address, *, until):
    """Watch from a thread until a revision; yields all that was seen: address and revision."""
    seen, loop, begun = [], asyncio.get_running_loop(), asyncio.Event()

    def take(client, status):
        seen.append((client.address, status.revision))
        loop.call_soon_threadsafe(begun.set)
        if status.revision == until:
            raise SeenError

    settings = StatusSettings(address=address, timeout_s=2.0)
    task = asyncio.create_task(
        asyncio.to_thread(watch_leader, settings, take, report=lambda _: None)
    )
    async with asyncio.timeout(BOUND_S):
        await begun.wait()
        yield seen
        with pytest.raises(SeenError):
            await task


async def test_a_watch_finds_the_next_leader(balancer, address):
    first, follower = Balancer(), Balancer()
    await first.tell(a_pool(revision=1))
    leader, follower.leader = await start(first)
    server, named = await start(follower)
    async with watching(named, until=2) as seen:
        assert seen == [(follower.leader, 1)]
        await leader.stop(None)
        await balancer.tell(a_pool(revision=2))
        follower.leader = address
    assert seen[-1] == (address, 2)
    await server.stop(None)


async def test_a_watch_leaves_a_follower_that_learns_who_leads(balancer, address, monkeypatch):
    monkeypatch.setattr("equipoise.cli.live.client.STREAM_S", 0.5)
    follower = Balancer()
    await follower.tell(a_pool(revision=1))
    await balancer.tell(a_pool(revision=2))
    server, named = await start(follower)
    async with watching(named, until=2) as seen:
        follower.leader = address
    assert seen[-1] == (address, 2)
    await server.stop(None)


async def test_a_watch_stays_with_the_leader_although_the_named_balancer_is_gone(
    balancer, address, monkeypatch
):
    monkeypatch.setattr("equipoise.cli.live.client.STREAM_S", 0.5)
    follower = Balancer()
    follower.leader = address
    await balancer.tell(a_pool(revision=1))
    server, named = await start(follower)
    async with watching(named, until=2) as seen:
        await server.stop(None)
        await asyncio.sleep(1.0)
        await balancer.tell(a_pool(revision=2))
    assert set(seen) == {(address, 1), (address, 2)}


async def test_a_call_whose_balancer_vanishes_without_a_word_fails(balancer, address):
    """By keepalive, 15 s; without, it would wait for its timeout."""
    await balancer.tell(a_pool())
    async with frozen_link(address) as wire:
        with Credentials().blocking_channel(wire.address) as channel:
            stream = status_pb2_grpc.StatusStub(channel).WatchStatus(pb.WatchStatusRequest())
            await asyncio.to_thread(next, stream)
            wire.freeze()
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.wait_for(asyncio.to_thread(next, stream), BOUND_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_watcher_without_a_terminal_prints_a_line_for_each_change(balancer, address):
    await balancer.tell(a_pool(revision=1))
    watcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "equipoise.cli.main", "status", "--address", address, "--watch"),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(BOUND_S):
        line = await watcher.stdout.readline()
        assert line.decode() == f"pool decode · serving · generation {2**40}\n"
        await balancer.tell(a_pool(revision=2))  # nothing in it that a line would show
        await balancer.tell(a_pool(revision=3, health=pb.POOL_HEALTH_WAITING))
        assert b"waiting" in await watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        await watcher.communicate()


def test_a_picture_that_is_no_longer_true_says_since_when(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("equipoise.cli.live.status.time.monotonic", lambda: now_s)
    picture = Picture()
    picture.take(a_pool())
    assert "as of" not in printed(picture.renderable())
    now_s = 107.0
    assert "updated 7 s ago" in printed(picture.renderable())
    picture.fault = "no balancer answers"
    assert "updated 7 s ago: no balancer answers" in printed(picture.renderable())
    picture.take(a_pool())
    assert "as of" not in printed(picture.renderable())


def printed(renderable):
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "wrong", [{"address": "h"}, {"address": "h:0"}, {"address": ":1"}, {"timeout_s": 0.0}]
)
def test_settings_outside_their_range_are_rejected(wrong):
    with pytest.raises(InvalidSettingsError, match=next(iter(wrong))):
        StatusSettings(**wrong)

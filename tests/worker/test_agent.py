"""The agent keeps a stream open, notices a dead one, backs off, and never gives up."""

import asyncio
import gc
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import psutil
import pytest

from equipoise.planning.counters import LoadReport
from equipoise.planning.phase import Phase
from equipoise.planning.topology import ModelShape
from equipoise.rank.agent import Outbox
from equipoise.rank.waits import Waits
from equipoise.wire.balancer_messages import Abort, Rejection
from equipoise.wire.checks import MAX_RANKS
from equipoise.wire.messages import (
    Heartbeat,
    Hello,
    LayoutRejected,
    Leaving,
    RankStats,
    Report,
    Wait,
)
from tests.support.agent_ranks import RecordingHandler, agent_of
from tests.support.limits import largest_join_epoch

REJECTED = LayoutRejected(epoch=1, rank=0, generation=2, reason="no")
REPORT = Report(
    load=LoadReport(
        boot_id="boot-1",
        epoch=1,
        rank=0,
        generation=1,
        phase=Phase.MIXED,
        assignments=np.zeros((2, 12), dtype=np.uint64),
    ),
    stats=RankStats(
        steps=0,
        tokens_processed=0,
        tokens_generated=0,
        median_step_us=0,
        active_requests=0,
        queued_requests=0,
    ),
)


class Rig(RecordingHandler):
    """An agent whose worker does nothing but record what it receives."""

    def __init__(self, *addresses, **changes):
        super().__init__(None)
        settings = {"heartbeat_interval_s": 0.05, "backoff_s": 0.01, "max_backoff_s": 0.05}
        self.outbox = Outbox()
        self.agent = agent_of(addresses, self, self.outbox, **settings | changes)
        self.num_hellos = 0

    def hello(self):
        self.num_hellos += 1
        return Hello(
            pool="p",
            worker="w",
            boot_id=f"boot-{self.num_hellos}",
            node="n",
            address="127.0.0.1:1",
            rendezvous_address="127.0.0.1:2",
            model=ModelShape(num_layers=2, num_experts=8, num_groups=2, expert_bytes=12_288),
            slots_per_rank=12,
            num_ranks=1,
            checkpoint_fingerprint="ab" * 16,
            experts_digest=bytes(16),
        )

    async def next(self):
        return await asyncio.wait_for(self.received.get(), 60)


@asynccontextmanager
async def running(rig):
    task = asyncio.create_task(rig.agent.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=60)


async def test_hello_comes_first_and_then_heartbeats_in_sequence(balancer):
    rig = Rig(balancer.address)
    async with running(rig):
        link = await balancer.link()
        await link.until(Heartbeat, lambda beat: beat.sequence == 3)
        assert isinstance(link.heard[0], Hello)
        assert [beat.sequence for beat in link.of(Heartbeat)][:3] == [1, 2, 3]


async def test_messages_flow_both_ways_while_heartbeats_continue(balancer):
    rig = Rig(balancer.address)
    abort = Abort(epoch=1, generation=2, reason="why not")
    async with running(rig):
        link = await balancer.link()
        link.say(abort)
        assert await rig.next() == abort
        for _ in range(100):
            rig.outbox.send(REJECTED)
        await link.until(Heartbeat, lambda beat: beat.sequence == 2)
        assert (
            await link.until(LayoutRejected, lambda _: len(link.of(LayoutRejected)) == 100)
            == REJECTED
        )


async def test_the_largest_join_epoch_arrives(balancer):
    hello, largest = largest_join_epoch(num_ranks=MAX_RANKS, num_layers=1)
    rig = Rig(balancer.address, ack_timeout_s=60.0)
    rig.hello = lambda: hello
    async with running(rig):
        link = await balancer.link()
        link.say(largest)
        assert (await rig.next()).peers == largest.peers


async def test_an_epoch_that_is_dropped_as_invalid_is_rejected_with_the_reason(balancer):
    hello, epoch = largest_join_epoch(num_ranks=4, num_layers=64)
    rig = Rig(balancer.address)
    rig.hello = lambda: replace(hello, worker="another")
    async with running(rig):
        link = await balancer.link()
        link.say(epoch)
        rejected = await link.until(LayoutRejected, lambda _: True)
        assert rejected.epoch == epoch.epoch
        assert (rejected.rank, rejected.generation) == (epoch.rank, epoch.layout.generation)
        assert "but the receiver is another" in rejected.reason
        assert await rig.dropped.get() == rejected.reason


async def test_a_report_carries_the_heartbeat(balancer):
    rig = Rig(balancer.address, heartbeat_interval_s=60.0)
    async with running(rig):
        link = await balancer.link()
        for _ in range(2):
            rig.outbox.send(REPORT)
        await link.until(Report, lambda report: report.heartbeat.sequence == 2)
        assert not link.of(Heartbeat)


async def test_a_stream_that_ends_is_reopened_with_a_new_hello(balancer):
    rig = Rig(balancer.address)
    async with running(rig):
        for number in range(1, 6):
            link = await balancer.link()
            assert link.hello.boot_id == f"boot-{number}"
            link.hang_up()


@pytest.mark.parametrize("way", ["ended by the balancer", "reopened", "silent"])
async def test_a_stream_that_ended_leaves_no_connection_to_the_garbage_collector(balancer, way):
    balancer.acknowledges = way != "silent"
    rig = Rig(balancer.address, ack_timeout_s=0.3 if way == "silent" else 60.0)
    descriptors = []
    gc.disable()
    try:
        async with running(rig):
            for _ in range(10):
                link = await balancer.link()
                descriptors.append(psutil.Process().num_fds())
                if way == "reopened":
                    rig.agent.reopen()
                elif way == "ended by the balancer":
                    link.hang_up()
                await link.until_closed()
    finally:
        gc.enable()
    assert descriptors[-1] <= descriptors[2] + 2, "of both ends of one connection"


async def test_a_stream_is_reopened_on_request_with_a_new_hello(balancer):
    rig = Rig(balancer.address, backoff_s=60.0)
    async with running(rig):
        for number in range(1, 4):
            link = await balancer.link()
            assert link.hello.boot_id == f"boot-{number}"
            rig.agent.reopen()


async def test_a_balancer_that_goes_away_and_returns_is_found_and_each_change_is_logged_once(
    balancer, caplog
):
    caplog.set_level("INFO")
    rig = Rig(balancer.address)
    async with running(rig):
        link = await balancer.link()
        await link.until(Heartbeat, lambda beat: beat.sequence == 3)
        await balancer.stop()
        link = await _restarted(balancer)
        await link.until(Heartbeat, lambda beat: beat.sequence == 3)
    said = [record.message for record in caplog.records if record.name.endswith("agent")]
    assert said[0].startswith("linked")
    assert said[-1].startswith("linked")
    assert all(before != after for before, after in pairwise(said))
    assert any("; retrying" in message for message in said)


async def test_a_worker_that_is_rejected_again_and_again_does_not_say_that_it_is_linked(
    balancer, caplog
):
    caplog.set_level("INFO")
    rig = Rig(balancer.address)
    rejection = Rejection(reason="not here", fatal=True)
    async with running(rig):
        for _ in range(3):
            link = await balancer.link()
            link.say(rejection)
            assert await rig.next() == rejection
            link.hang_up()
        await balancer.link()
    said = [record.message for record in caplog.records if record.name.endswith("agent")]
    assert len(said) == 1
    assert "the balancer closed the stream; retrying" in said[0]


async def _restarted(balancer):
    await balancer.start()
    return await balancer.link()


async def test_a_hung_balancer_is_considered_lost(balancer, caplog):
    caplog.set_level("INFO")
    balancer.acknowledges = False
    waits = Waits({Wait.ACK: 0.3})
    rig = Rig(balancer.address, ack_timeout_s=0.3, waits=waits)
    async with running(rig):
        first = await balancer.link()
        await balancer.link()
        await first.until_closed()
        assert len(first.of(Heartbeat)) >= 2
    assert "no message from the balancer for 0.3 s" in caplog.text
    (ack,) = waits.all()
    assert ack.reached >= 1
    assert ack.latest == f"disconnected from the balancer at {balancer.address}"


async def test_a_graceful_shutdown_is_announced_in_the_last_message(balancer):
    rig = Rig(balancer.address)
    async with running(rig) as task:
        link = await balancer.link()
        await link.until(Heartbeat)
        await rig.agent.leave("maintenance", timeout_s=60)
        await asyncio.wait_for(task, 60)
    assert link.heard[-1] == Leaving(reason="maintenance")
    assert rig.num_hellos == 1


async def test_leaving_without_a_balancer_waits_for_nothing():
    rig = Rig("127.0.0.1:1")
    async with running(rig):
        await asyncio.wait_for(rig.agent.leave("maintenance", timeout_s=10_000), 60)


async def test_rejections_do_not_reset_the_backoff_and_are_no_links(balancer, caplog):
    caplog.set_level("INFO")
    bounds = []

    def uniform(low, high):
        bounds.append(high)
        return low

    rig = Rig(balancer.address, uniform=uniform)
    async with running(rig):
        for _ in range(4):
            link = await balancer.link()
            link.say(Rejection(reason="another model", fatal=True))
            link.hang_up()
            assert (await rig.next()).fatal
    assert bounds[:3] == [0.02, 0.04, 0.05]
    assert "linked" not in caplog.text
    assert caplog.text.count("; retrying") == 1


async def test_reconnects_are_spread_below_a_bound_that_doubles():
    drawn = []

    def uniform(low, high):
        drawn.append((low, high))
        return low

    rig = Rig("127.0.0.1:1", backoff_s=0.2, max_backoff_s=1.0, uniform=uniform)
    async with running(rig):
        async with asyncio.timeout(60):
            while len(drawn) < 5:  # noqa: ASYNC110 - attempts fail at once
                await asyncio.sleep(0.01)
    assert drawn[:5] == [(0, 0.4), (0, 0.8), (0, 1.0), (0, 1.0), (0, 1.0)]


async def test_messages_sent_without_a_stream_are_dropped(balancer):
    rig = Rig(balancer.address)
    rig.outbox.send(REJECTED)
    async with running(rig):
        link = await balancer.link()
        await link.until(Heartbeat)
    assert link.of(LayoutRejected) == []


async def test_an_invalid_message_is_dropped_and_the_stream_continues(
    balancer, caplog, monkeypatch
):
    from equipoise_api.v1 import worker_link_pb2

    monkeypatch.setitem(
        type(balancer).Connect.__globals__,
        "to_worker",
        lambda message: worker_link_pb2.ConnectResponse(),
    )
    balancer.acknowledges = False
    rig = Rig(balancer.address)
    async with running(rig):
        link = await balancer.link()
        link.say("nonsense")
        await link.until(Heartbeat, lambda beat: beat.sequence == 4)
        assert balancer.links.empty()
    assert rig.received.empty()
    assert not rig.dropped.empty()
    assert "dropped an invalid message" in caplog.text

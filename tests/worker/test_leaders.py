"""A worker with several balancers follows the leader and obeys no other."""

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.topology import ModelShape
from equipoise.rank.agent import Outbox
from equipoise.settings.errors import InvalidSettingsError
from equipoise.wire.balancer_messages import Abort, Rejection, Stage, TermConfirmed
from equipoise.wire.checks import MAX_TERM
from equipoise.wire.messages import Heartbeat, Hello
from equipoise.worker.settings import WorkerSettings
from tests.support.agent_ranks import RecordingHandler, agent_of

BOUND_S = 60.0
NO_LEADER = Rejection(reason="no leader yet", fatal=True, not_leading=True)


def layout_of(generation):
    return contiguous_layout(
        num_layers=2, num_experts=8, num_ranks=1, slots_per_rank=12, generation=generation
    )


def stage_of(generation, *, term):
    return Stage(
        epoch=1,
        layout=layout_of(generation),
        base_generation=generation - 1,
        moves=(),
        timeout_s=9.0,
        term=term,
    )


HELLO = Hello(
    pool="p",
    worker="w",
    boot_id="b",
    node="n",
    address="127.0.0.1:1",
    rendezvous_address="127.0.0.1:2",
    model=ModelShape(num_layers=2, num_experts=8, num_groups=2, expert_bytes=12_288),
    slots_per_rank=12,
    num_ranks=1,
    checkpoint_fingerprint="ab" * 16,
    experts_digest=bytes(16),
)


class Rig(RecordingHandler):
    """An agent whose worker records what it receives and what is dropped."""

    def __init__(self, *addresses):
        super().__init__(HELLO)
        self.outbox = Outbox()
        self.agent = agent_of(
            addresses,
            self,
            self.outbox,
            heartbeat_interval_s=0.05,
            backoff_s=0.01,
            max_backoff_s=0.05,
        )


@asynccontextmanager
async def running(*addresses):
    rig = Rig(*addresses)
    task = asyncio.create_task(rig.agent.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=BOUND_S)


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, BOUND_S)


@pytest_asyncio.fixture
async def other_balancer(balancer):
    scripted = type(balancer)()
    await scripted.start()
    yield scripted
    await scripted.stop()


async def test_a_follower_redirects_the_worker_to_the_leader(balancer, other_balancer):
    async with running(balancer.address) as rig:
        link = await balancer.link()
        link.say(replace(NO_LEADER, leader_address=other_balancer.address))
        link.hang_up()
        link = await other_balancer.link()
        link.say(Abort(epoch=1, generation=2, reason="why not", term=3))
        assert (await soon(rig.received.get())).generation == 2


async def test_without_a_leader_balancers_are_tried_in_turn_until_one_leads(
    balancer, other_balancer
):
    async with running(balancer.address, other_balancer.address) as rig:
        for _ in range(3):
            for follower in (balancer, other_balancer):
                link = await follower.link()
                link.say(NO_LEADER)
                link.hang_up()
        link = await balancer.link()
        await link.until(Heartbeat, lambda beat: beat.sequence == 2)
        assert rig.received.empty(), "no rejection for the worker to stop at"


async def test_after_a_dead_balancer_the_next_one_is_tried(balancer, other_balancer):
    async with running(balancer.address, other_balancer.address):
        await (await balancer.link()).until(Heartbeat)
        await balancer.stop()
        await (await other_balancer.link()).until(Heartbeat)


async def test_a_redirect_to_a_dead_address_is_forgotten(balancer):
    async with running(balancer.address):
        link = await balancer.link()
        link.say(replace(NO_LEADER, leader_address="127.0.0.1:1"))
        link.hang_up()
        await (await balancer.link()).until(Heartbeat)


async def obeyed(rig, link, message):
    link.say(message)
    assert (await soon(rig.received.get())).term == message.term


async def test_messages_of_a_former_leader_are_dropped_and_end_its_stream(balancer, other_balancer):
    async with running(balancer.address, other_balancer.address) as rig:
        link = await balancer.link()
        assert link.hello.highest_term == 0
        await obeyed(rig, link, stage_of(2, term=5))
        link.hang_up()
        links = itertools.cycle((other_balancer, balancer))
        for stale in (stage_of(3, term=4), Abort(epoch=1, generation=2, reason="x", term=0)):
            old = await next(links).link()
            assert old.hello.highest_term == 5
            old.say(stale)
            reason = await soon(rig.dropped.get())
            assert reason == f"its term {stale.term} has ended; the current term is 5"
        await obeyed(
            rig, await next(links).link(), Abort(epoch=1, generation=3, reason="y", term=5)
        )
        assert rig.received.empty()


async def test_a_false_term_lasts_only_until_a_leader_with_a_lease_answers(
    balancer, other_balancer
):
    async with running(balancer.address, other_balancer.address) as rig:
        link = await balancer.link()
        await obeyed(rig, link, stage_of(2, term=5))
        await obeyed(rig, link, stage_of(3, term=MAX_TERM))
        link.say(stage_of(4, term=5))
        assert "its term 5 has ended" in await soon(rig.dropped.get())
        link = await other_balancer.link()
        assert link.hello.highest_term == MAX_TERM
        link.say(TermConfirmed(term=6, replaced_term=MAX_TERM))
        await obeyed(rig, link, stage_of(4, term=6))
        link.say(stage_of(5, term=5))
        assert "the current term is 6" in await soon(rig.dropped.get())
        link = await balancer.link()
        assert link.hello.highest_term == 6


async def test_a_lower_term_is_confirmed_for_the_claim_of_the_stream_only(balancer):
    async with running(balancer.address) as rig:
        link = await balancer.link()
        await obeyed(rig, link, stage_of(2, term=9))
        for replaced in (0, 8, 9):  # This stream began with 0; it obeys 9 only since then.
            link.say(TermConfirmed(term=1, replaced_term=replaced))
        link.say(stage_of(3, term=1))
        assert "the current term is 9" in await soon(rig.dropped.get())


@pytest.mark.parametrize("term", [MAX_TERM + 1, 2**53, 2**63])
async def test_a_term_that_no_leader_can_have_is_not_obeyed(balancer, term):
    async with running(balancer.address) as rig:
        link = await balancer.link()
        link.say(stage_of(2, term=term))
        assert f"term must be from 0 to 2147483647, not {term}" in await soon(rig.dropped.get())
        await obeyed(rig, link, stage_of(2, term=1))


def test_several_balancers_are_separated_by_commas(tmp_path):
    given = "127.0.0.1:7070,localhost:7071"
    assert WorkerSettings(balancer=given, checkpoint=tmp_path).balancer == given


@pytest.mark.parametrize("given", ["", "a:1,", ",a:1", "a:1,b", "a:1, b:x"])
def test_each_of_them_must_be_an_address(given, tmp_path):
    with pytest.raises(InvalidSettingsError, match="balancer"):
        WorkerSettings(balancer=given, checkpoint=tmp_path)

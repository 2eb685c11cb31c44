"""Requests whose answer from the store is late, or that arrive late themselves."""

import asyncio
from dataclasses import replace

import pytest
from opentelemetry.trace import NoOpTracer
from redis import Redis

from equipoise.balancer import runner as runner_module
from equipoise.balancer.errors import UnansweredError
from equipoise.balancer.loop_share import LoopShares
from equipoise.balancer.persistence import restore
from equipoise.balancer.runner import PoolRunner
from equipoise.balancer.store.redis_store import HASH_TAG, RedisStore
from equipoise.balancer.store.store import UnreadablePoolError
from equipoise.balancer.wave_turns import WaveTurns
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.pool.controller import PoolController
from equipoise.pool.journal import Journal
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import MAX_AUDIT, Hold, PoolMemory
from equipoise.pool.requests import Pause, Resume, Unpin
from tests.simulation import store as simulated
from tests.simulation.store import Link, SimStore, StoreServer
from tests.support.balancers import ThreadPlanner
from tests.support.store_records import AN_ORDER, layout_of
from tests.support.tcp_proxy import TcpProxy

TERM = 7
PAUSED = Hold(paused="ann")
AN_REFUSAL = replace(AN_ORDER, who="bob", accepted=False)
WAIT_S = 60.0
UNKNOWN = "unknown whether this was done: look at the audit"


class HeldLink(Link):
    """Holds requests, or answers, back while told to."""

    def __init__(self):
        self.holds_requests = self.drops_answers = False
        self._held = []

    def carry(self, request):
        if self.holds_requests:
            self._held.append(request)
        else:
            request()

    def answer(self, deliver):
        if not self.drops_answers:
            deliver()

    def release(self):
        """Deliver what was held back, as retransmitted segments are."""
        self.holds_requests = False
        for request in self._held:
            request()


class Tenure:
    """A term that must not end."""

    term = TERM

    def holds(self):
        return True

    def start_over(self, reason):
        raise AssertionError(reason)


@pytest.fixture
def link():
    return HeldLink()


@pytest.fixture
async def store(link, monkeypatch):
    monkeypatch.setattr(simulated, "TIMEOUT_S", 0.05)
    opened = SimStore(StoreServer(), link)
    await opened.fence(term=TERM)
    await opened.adopt("tiny", layout_of(1), term=TERM)
    return opened


class Leader:
    """The leader of one pool, which looks at its store when told to."""

    def __init__(self, store, memory):
        policies = PolicyBook(Policy())
        self.runner = PoolRunner(
            PoolController("tiny", policies=policies, memory=memory, term=TERM),
            store=store,
            tenure=Tenure(),
            planner=ThreadPlanner(),
            wave_turns=WaveTurns(),
            loop_shares=LoopShares(),
            clock=lambda: 1.7e9 + asyncio.get_running_loop().time(),
            tracer=NoOpTracer(),
        )

    @property
    def hold(self):
        return self.runner.pool.journal.hold

    async def ask(self, operation, who):
        return await self.runner.administer(operation, who=who, reason="", what=f"of {who}")

    async def look(self):
        await self.runner._writes.restore_lost()


@pytest.fixture
async def leader(store, monkeypatch):
    monkeypatch.setattr(runner_module, "COMPARE_S", 3600.0)
    made = Leader(store, await store.recall("tiny"))
    task = asyncio.create_task(made.runner.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def requests_in(store):
    """(who, accepted) of all audit records, oldest first."""
    audit = await store.audit("tiny", limit=99)
    return [(one.who, one.accepted) for one in reversed(audit)]


@pytest.mark.parametrize(
    ("operation", "accepted", "held_by"), [(Unpin(), False, "ann"), (Resume(), True, "")]
)
async def test_a_request_is_decided_with_one_that_was_confirmed_too_late(
    leader, store, link, operation, accepted, held_by
):
    link.drops_answers = True
    with pytest.raises(UnansweredError, match=UNKNOWN):
        await leader.ask(Pause(), "ann")
    link.drops_answers = False
    with pytest.raises(UnansweredError, match="nothing was done: an earlier request was recorded"):
        await leader.ask(operation, "bob")
    assert leader.hold.paused == "ann"
    assert not leader.runner.pool.journal.store_fault
    assert (await leader.ask(operation, "bob")).accepted == accepted
    await leader.look()
    assert await requests_in(store) == [("ann", True), ("bob", accepted)]
    assert (await store.recall("tiny")).hold.paused == leader.hold.paused == held_by


async def test_a_request_that_arrives_after_a_later_one_was_confirmed_is_not_recorded(
    leader, store, link
):
    link.holds_requests = True
    with pytest.raises(UnansweredError, match=UNKNOWN):
        await leader.ask(Pause(), "ann")
    link.holds_requests = False
    assert not (await leader.ask(Unpin(), "bob")).accepted
    link.release()
    await leader.look()
    assert await requests_in(store) == [("bob", False)]
    assert (await store.recall("tiny")).hold.paused == leader.hold.paused == ""


async def test_what_another_leader_lost_is_found_behind_the_latest_records(store):
    """The store was emptied while this one was suspended, and others recorded many requests."""
    ann = await store.add_audit("tiny", AN_ORDER, hold=PAUSED, after=0, term=TERM)
    policy = PoolPolicy("tiny", PolicyBook(Policy()), recorded="")
    known = Journal(policy, await store.recall("tiny"))
    later = SimStore(StoreServer())
    await later.fence(term=TERM)
    for after in range(2 * MAX_AUDIT):
        await later.add_audit("tiny", AN_REFUSAL, hold=None, after=after, term=TERM)
    memory = await restore(later, "tiny", known=known, term=TERM)
    assert memory.hold.paused == "ann"
    newest = (await later.audit("tiny", limit=1))[0]
    assert newest == replace(ann, sequence=2 * MAX_AUDIT + 1)
    assert memory.audit[0] == newest


async def test_requests_are_recorded_although_the_latest_records_were_deleted_by_hand(
    redis_server,
):
    """The numbers of those that are restored are above all that were ever used."""
    store = RedisStore(redis_server.url, timeout_s=20.0)
    await store.fence(term=TERM)
    for after in range(20):
        await store.add_audit("tiny", AN_ORDER, hold=PAUSED, after=after, term=TERM)
    policy = PoolPolicy("tiny", PolicyBook(Policy()), recorded="")
    known = Journal(policy, await store.recall("tiny"))
    with Redis.from_url(redis_server.url) as operator:
        operator.xdel(f"{HASH_TAG}:pool:tiny:audit", "20-0", "19-0")
    memory = await restore(store, "tiny", known=known, term=TERM)
    assert [one.sequence for one in memory.audit[:3]] == [18, 17, 16]
    latest = memory.audit[0].sequence
    added = await store.add_audit("tiny", AN_ORDER, hold=None, after=latest, term=TERM)
    assert added.sequence == 21
    await store.close()


async def test_a_damaged_record_that_nobody_needs_keeps_no_pool_from_being_read(store):
    policy = PoolPolicy("tiny", PolicyBook(Policy()), recorded="")
    known = Journal(policy, PoolMemory(audit=(replace(AN_ORDER, sequence=99),), hold=PAUSED))
    for after in range(2 * MAX_AUDIT):
        await store.add_audit("tiny", AN_REFUSAL, hold=None, after=after, term=TERM)

    async def damaged(_pool, *, limit):
        raise UnreadablePoolError("an old record is damaged")

    store.audit = damaged
    memory = await restore(store, "tiny", known=known, term=TERM)
    assert memory.hold.paused == "", "the hold in the store counts"


async def test_a_connection_that_breaks_leaves_it_unknown_whether_a_write_happened(
    redis_server, monkeypatch
):
    monkeypatch.setattr(runner_module, "COMPARE_S", 3600.0)
    async with TcpProxy(redis_server.port) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=20.0)
        await store.fence(term=TERM)
        # The server then knows the script, so that one message is enough.
        await store.add_audit("other", AN_ORDER, hold=None, after=0, term=TERM)
        leader = Leader(store, await store.recall("tiny"))
        task = asyncio.create_task(leader.runner.run())
        proxy.hold("down")
        asking = asyncio.create_task(leader.ask(Pause(), "ann"))
        direct = RedisStore(redis_server.url, timeout_s=20.0)
        async with asyncio.timeout(WAIT_S):
            while not await direct.audit("tiny", limit=1):  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.01)
        proxy.drop()
        with pytest.raises(UnansweredError, match=UNKNOWN):
            await asking
        proxy.heal()
        await leader.look()
        assert leader.hold.paused == "ann"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()
        await direct.close()

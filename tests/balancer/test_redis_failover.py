"""A Redis primary is cut off and its replica promoted, with a leader on the side of the old one."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis import Redis

from equipoise.balancer.__main__ import _warn_of_failover
from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.leader_state import SKIPPED_TERMS
from equipoise.balancer.leadership.lease import Candidate, LeaseRecord, LeaseTiming
from equipoise.balancer.leadership.redis_register import RedisRegister
from equipoise.balancer.leadership.register import RegisterError
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.store import StoreError, StoreFault, TermOverError
from tests.support.redis_replica import (
    is_synchronised,
    promote,
    replicated,
    takes_no_write,
    until,
    until_replicated,
)
from tests.support.redis_server import RedisServer, require_redis
from tests.support.store_records import layout_of
from tests.support.tcp_proxy import TcpProxy

WAIT_S = 60.0
MAX_LAG_S = 1
TIMING = LeaseTiming()
REQUIRED = {"min-replicas-to-write": 1, "min-replicas-max-lag": MAX_LAG_S}


class Side:
    """A balancer's elector and store at one Redis server."""

    def __init__(self, name, server) -> None:
        self.server = server
        self.store = RedisStore(server.url)
        self.register = RedisRegister(server.url, timeout_s=TIMING.request_timeout_s)
        candidate = Candidate(name=name, address=f"{name}:7070", term_offset=1)
        self.elector = Elector(self.register, candidate=candidate, timing=TIMING)

    def leads(self):
        return self.elector.leads()

    async def tenure(self):
        return await asyncio.wait_for(self.elector.tenure(), WAIT_S)

    async def close(self):
        await self.store.close()
        await self.register.close()


@asynccontextmanager
async def sides_of(primary, replica):
    """Balancers that reach one of the servers each; the first one leads in term 1."""
    old, new = Side("old", primary), Side("new", replica)
    try:
        async with old.elector.running():
            tenure = await old.tenure()
            assert tenure.term == 1
            await old.store.fence(term=1)
            await old.store.adopt("p", layout_of(1), term=1)
            with Redis.from_url(primary.url) as client:
                await until_replicated(client)
            async with new.elector.running():
                await until(lambda: "read-only replica" in new.elector.state.reason)
                yield old, new
    finally:
        await old.close()
        await new.close()


@pytest.mark.parametrize(
    ("held", "is_late"), [("both", False), ("up", False), ("both", True), ("down", True)]
)
async def test_with_required_replicas_a_cut_off_primary_takes_no_write_and_its_leader_stops(
    tmp_path, held, is_late
):
    """The failover comes when the primary rejects writes, or when the old term should be over."""
    async with (
        replicated(tmp_path, **REQUIRED) as (primary, link, replica),
        sides_of(primary, replica) as (old, new),
    ):
        link.hold(*(() if held == "both" else (held,)))
        if held == "down":
            # While the replica still acknowledges, the primary does not notice.
            await asyncio.sleep(TIMING.duration_s + 2 * MAX_LAG_S)
            assert old.leads()
        elif is_late:
            await until(lambda: not old.leads())
        else:
            await until(lambda: takes_no_write(primary))
            assert old.leads(), "its lease is not over yet"
        promote(replica)
        tenure = await new.tenure()
        assert not old.leads()
        assert tenure.term == 2 + SKIPPED_TERMS
        await new.store.fence(term=tenure.term)
        with pytest.raises(StoreError, match="accepts no writes without its replicas") as caught:
            await old.store.adopt("p", layout_of(2), term=1)
        assert caught.value.fault is StoreFault.FULL


async def test_without_required_replicas_two_lead_until_the_old_primary_follows_the_new_one(
    tmp_path,
):
    async with (
        replicated(tmp_path) as (primary, link, replica),
        sides_of(primary, replica) as (old, new),
    ):
        link.hold()
        promote(replica)
        term = (await new.tenure()).term
        await new.store.fence(term=term)
        assert old.leads(), "the limit that docs/high-availability.md states"
        await old.store.adopt("p", layout_of(2), term=1)
        with Redis.from_url(primary.url) as client:
            client.replicaof("127.0.0.1", replica.port)
            await until(lambda: is_synchronised(client))
        await until(lambda: not old.leads() and "read-only" in old.elector.state.reason)
        assert new.leads()
        # What was written on the wrong side is gone; ranks report what they run.
        assert (await old.store.recall("p")).committed.generation == 1
        with pytest.raises(StoreError, match=f"a balancer of term {term} has taken over"):
            await old.store.fence(term=1)


async def test_a_server_whose_failover_can_leave_two_leaders_is_warned_of(tmp_path, caplog):
    async with replicated(tmp_path) as (primary, _, replica):
        for server, risk in ((primary, "has 1 replica but accepts writes"), (replica, "")):
            register = RedisRegister(server.url, timeout_s=20.0)
            caplog.clear()
            await _warn_of_failover(register)
            assert risk in caplog.text
            assert bool(risk) == ("set its min-replicas-to-write" in caplog.text)
            await register.close()
        with Redis.from_url(primary.url) as client:
            client.config_set("min-replicas-to-write", 1)
            register = RedisRegister(primary.url, timeout_s=20.0)
            caplog.clear()
            await _warn_of_failover(register)
            assert caplog.text == ""
            options = {"replicaof": f"127.0.0.1 {primary.port}", "repl-timeout": 60}
            async with AsyncExitStack() as more:
                for name in ("second", "third"):
                    more.enter_context(RedisServer(tmp_path / name, options=options))
                await until(lambda: client.info("replication")["connected_slaves"] == 3)
                await _warn_of_failover(register)
            assert "accepts writes with only 1 of them" in caplog.text
            assert "set its min-replicas-to-write to 2" in caplog.text
            caplog.clear()
            client.execute_command("ACL SETUSER default -info")
            await _warn_of_failover(register)
            assert "cannot tell" in caplog.text
            client.execute_command("ACL SETUSER default +info")
            await register.close()


async def test_a_promoted_replica_rejects_writes_of_a_term_that_began_before(tmp_path):
    """A leader whose fence survived the failover may have had a successor whose fence did not."""
    async with replicated(tmp_path) as (primary, _, replica):
        old = RedisStore(primary.url)
        await old.fence(term=4)
        await old.adopt("p", layout_of(1), term=4)
        with Redis.from_url(primary.url) as client:
            await until_replicated(client)
        await old.close()
        promote(replica)
        new = RedisStore(replica.url)
        for write in (
            lambda: new.fence(term=4),
            lambda: new.put_proposed("p", layout_of(2), term=4),
        ):
            with pytest.raises(
                TermOverError, match="term 4 is over, the store failed over"
            ) as over:
                await write()
            assert over.value.highest_term == 4
        assert (await new.recall("p")).committed.generation == 1
        await new.fence(term=5)
        await new.put_proposed("p", layout_of(2), term=5)
        await new.close()


async def test_an_account_that_may_not_see_replication_keeps_its_term(tmp_path):
    require_redis()
    with RedisServer(tmp_path) as server, Redis.from_url(server.url) as client:
        client.execute_command("ACL SETUSER default -info")
        store = RedisStore(server.url)
        await store.fence(term=4)
        await store.adopt("p", layout_of(1), term=4)
        assert (await store.recall("p")).committed.generation == 1
        await store.close()
        client.execute_command("ACL SETUSER default +info")


async def test_a_lease_is_found_at_the_new_primary_behind_the_same_address(tmp_path):
    """The old primary lives on as a replica, and keeps the connections that were made to it."""
    async with replicated(tmp_path) as (primary, _, replica), TcpProxy(primary.port) as address:
        register = RedisRegister(f"redis://127.0.0.1:{address.port}/0", timeout_s=20.0)
        record = LeaseRecord(holder="a", address="a:1", term=3, renewals=0, duration_s=3.0)
        await register.write(record, replacing=None)
        with Redis.from_url(primary.url) as client:
            await until_replicated(client)
            promote(replica)
            address.redirect(replica.port)
            client.replicaof("127.0.0.1", replica.port)
        with pytest.raises(RegisterError, match="read-only replica"):
            await register.read()
        assert (await register.read()).record == record
        await register.close()

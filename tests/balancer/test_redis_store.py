"""Faults of Redis: each has a name and a remedy, and none leaves wrong data."""

import asyncio

import numpy as np
import pytest
from redis import Redis
from redis._parsers.base import BaseParser
from redis.crc import key_slot

from equipoise.balancer.store.redis_store import HASH_TAG, RedisStore
from equipoise.balancer.store.store import (
    StoreConflictError,
    StoreError,
    StoreFault,
    TermOverError,
)
from equipoise.planning.layout import contiguous_layout
from equipoise.pool.records import AverageRecord, DecisionRecord
from tests.support.redis_server import RedisServer, free_port, require_redis

PATIENT_S = 20.0
HASTY_S = 0.3


def layout_of(generation):
    return contiguous_layout(
        num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4, generation=generation
    )


@pytest.fixture
async def open_at():
    """Opens a store; what was opened is closed at the end."""
    opened = []

    def open_store(url, *, timeout_s=PATIENT_S, password_file=""):
        opened.append(RedisStore(url, timeout_s=timeout_s, password_file=password_file))
        return opened[-1]

    yield open_store
    for store in opened:
        await store.close()


async def fault_of(call):
    with pytest.raises(StoreError) as caught:
        await call
    return caught.value


async def test_a_server_that_is_not_there_is_unreachable(open_at):
    error = await fault_of(open_at(f"redis://127.0.0.1:{free_port()}").pools())
    assert error.fault is StoreFault.UNREACHABLE
    assert "check that it is running" in str(error)


async def test_an_invalid_address_is_reported_at_once():
    with pytest.raises(StoreError, match="use one like redis://host:6379/0"):
        RedisStore("http://127.0.0.1:6379")


async def test_work_continues_after_the_server_was_killed_and_restarted(redis_server, open_at):
    store = open_at(redis_server.url)
    await store.fence(term=1)
    await store.put_proposed("p", layout_of(1), term=1)
    redis_server.kill()
    error = await fault_of(store.commit("p", 1, previous=None, term=1))
    assert error.fault is StoreFault.BROKEN
    error = await fault_of(store.commit("p", 1, previous=None, term=1))
    assert error.fault is StoreFault.UNREACHABLE
    redis_server.start()
    with pytest.raises(TermOverError, match="the store failed over"):
        await store.commit("p", 1, previous=None, term=1)
    await store.fence(term=2)
    await store.commit("p", 1, previous=None, term=2)
    assert (await store.recall("p")).committed.generation == 1


async def test_a_write_that_a_slow_server_may_have_made_can_be_retried(redis_server, open_at):
    hasty = open_at(redis_server.url, timeout_s=HASTY_S)
    await hasty.fence(term=1)
    await hasty.put_proposed("p", layout_of(1), term=1)
    redis_server.pause()
    error = await fault_of(hasty.commit("p", 1, previous=None, term=1))
    assert error.fault is StoreFault.SLOW
    assert "did not answer within 0.3 s" in str(error)
    redis_server.resume()
    # Whether the first one was taken is unknown, and makes no difference.
    patient = open_at(redis_server.url)
    await patient.commit("p", 1, previous=None, term=1)
    await patient.put_proposed("p", layout_of(2), term=1)
    assert (await patient.recall("p")).next_generation == 3


async def test_a_server_that_came_back_empty_is_noticed_by_the_next_read_and_write(
    redis_server, open_at
):
    writer, reader = open_at(redis_server.url), open_at(redis_server.url)
    await writer.fence(term=3)
    await writer.adopt("p", layout_of(7), term=3)
    assert (await reader.recall("p")).committed.generation == 7
    redis_server.restart_empty()
    calls = (lambda: writer.put_proposed("p", layout_of(8), term=3), lambda: reader.recall("p"))
    for call in calls:
        error = await fault_of(call())
        if error.fault is StoreFault.BROKEN:  # The old connection had not been missed yet.
            error = await fault_of(call())
        for _ in range(2):  # Whoever finds it, nobody else misses it.
            assert error.fault is StoreFault.LOST
            assert "was emptied or replaced" in str(error)
            error = await fault_of(call())
    # From here on it is a new store, which first gets what workers report.
    reader.reopen()
    writer.reopen()
    await writer.fence(term=4)
    assert (await writer.recall("p")).next_generation == 1
    await writer.adopt("p", layout_of(7), term=4)
    assert (await reader.recall("p")).next_generation == 8


async def test_a_full_server_takes_no_write_and_still_reads(redis_server, open_at):
    store = open_at(redis_server.url)
    await store.fence(term=1)
    await store.put_proposed("p", layout_of(1), term=1)
    with Redis.from_url(redis_server.url) as operator:
        operator.config_set("maxmemory-policy", "noeviction")
        operator.config_set("maxmemory", 1)
        writes = [
            store.commit("p", 1, previous=None, term=1),
            store.put_proposed("p", layout_of(2), term=1),
            store.adopt("p", layout_of(2), term=1),
            store.fence(term=2),
        ]
        for write in writes:
            error = await fault_of(write)
            assert error.fault is StoreFault.FULL
            assert "raise its maxmemory" in str(error)
        assert (await store.recall("p")).committed is None
        assert (await store.recall("p")).proposed.generation == 1
        assert await store.highest_term() == 1
        operator.config_set("maxmemory", 0)
    await store.commit("p", 1, previous=None, term=1)


async def test_a_server_that_lost_its_replicas_takes_no_write_and_still_reads(
    redis_server, open_at
):
    store = open_at(redis_server.url)
    await store.fence(term=1)
    await store.put_proposed("p", layout_of(1), term=1)
    with Redis.from_url(redis_server.url) as operator:
        operator.config_set("min-replicas-to-write", 1)
        for write in (store.commit("p", 1, previous=None, term=1), store.fence(term=2)):
            error = await fault_of(write)
            assert error.fault is StoreFault.FULL
            assert "accepts no writes without its replicas" in str(error)
        assert (await store.recall("p")).proposed.generation == 1
        operator.config_set("min-replicas-to-write", 0)
    await store.commit("p", 1, previous=None, term=1)


async def test_a_server_that_went_back_in_time_gets_what_ranks_run(redis_server, open_at, tmp_path):
    writer = open_at(redis_server.url)
    await writer.fence(term=1)
    await writer.adopt("p", layout_of(3), term=1)
    redis_server.back_up(tmp_path / "older")
    await writer.put_proposed("p", layout_of(4), term=1)
    await writer.commit("p", 4, previous=3, term=1)
    await writer.put_proposed("p", layout_of(5), term=1)
    redis_server.restart_from(tmp_path / "older")
    # Nothing shows that it is old until a write mentions something that it should contain.
    later = open_at(redis_server.url)
    await later.fence(term=2)
    for write in (
        lambda: later.commit("p", 5, previous=4, term=2),
        lambda: later.commit("p", 4, previous=3, term=2),
    ):
        error = await fault_of(write())
        assert isinstance(error, StoreConflictError)
    await later.adopt("p", layout_of(4), term=2)
    assert (await later.recall("p")).committed.generation == 4
    assert (await later.recall("p")).next_generation == 5


async def test_a_wrong_password_is_denied_and_never_shown(tmp_path, open_at):
    path = tmp_path / "password"
    with RedisServer(tmp_path / "locked", password="open-sesame") as server:
        url = f"redis://127.0.0.1:{server.port}"
        path.write_text("open-barley\n")
        for password_file in (str(path), ""):
            error = await fault_of(open_at(url, password_file=password_file).pools())
            assert error.fault is StoreFault.DENIED
            assert "password" in str(error)
            assert "barley" not in str(error)
        store = open_at(url, password_file=str(path))
        path.write_text("open-sesame\n")
        assert await store.pools() == (), "the file is read for every connection"


def test_a_password_file_that_is_missing_is_named(tmp_path):
    path = tmp_path / "none"
    with pytest.raises(StoreError, match=f"store_password_file {path}: No such file"):
        RedisStore("redis://r:6379/0", password_file=str(path))


async def test_a_user_without_the_right_to_write_is_denied(redis_server, open_at, tmp_path):
    path = tmp_path / "password"
    path.write_text("x")
    with Redis.from_url(redis_server.url) as operator:
        operator.acl_setuser("reader", enabled=True, passwords=["+x"], keys="*", commands=["+get"])
    url = redis_server.url.replace("redis://", "redis://reader@")
    error = await fault_of(open_at(url, password_file=str(path)).pools())
    assert error.fault is StoreFault.DENIED


async def test_a_replica_is_rejected_by_name(redis_server, tmp_path, open_at):
    await open_at(redis_server.url).pools()
    with RedisServer(tmp_path / "replica") as replica, Redis.from_url(replica.url) as operator:
        operator.replicaof("127.0.0.1", redis_server.port)
        error = await fault_of(open_at(replica.url).fence(term=1))
    assert error.fault is StoreFault.UNREACHABLE, "it may become the primary"
    assert "use the primary" in str(error)


async def test_another_schema_version_is_rejected_and_left_alone(redis_url, open_at):
    await open_at(redis_url).fence(term=1)
    with Redis.from_url(redis_url) as operator:
        operator.hset(f"{HASH_TAG}:meta", "schema", 4)
        before = operator.hgetall(f"{HASH_TAG}:meta")
        for call in (open_at(redis_url).pools(), open_at(redis_url).fence(term=9)):
            error = await fault_of(call)
            assert error.fault is StoreFault.FOREIGN
            assert "has schema version 4, this release reads 3: use the release" in str(error)
        assert operator.hgetall(f"{HASH_TAG}:meta") == before


async def test_records_of_the_first_version_are_read_and_marked(redis_url, open_at):
    store = open_at(redis_url)
    await store.fence(term=1)
    await store.adopt("p", layout_of(1), term=1)
    with Redis.from_url(redis_url) as operator:
        operator.hset(f"{HASH_TAG}:meta", "schema", 1)
        newer = open_at(redis_url)
        committed = (await newer.recall("p")).committed
        assert committed.same_placement(layout_of(1))
        assert operator.hget(f"{HASH_TAG}:meta", "schema") == b"1", "a follower changes nothing"
        await newer.fence(term=2)
        assert operator.hget(f"{HASH_TAG}:meta", "schema") == b"3"


DECISION = DecisionRecord(accepted=True, reason="one", base_generation=1, time_unix_s=1.0)


@pytest.mark.parametrize("lost", ["pool:p", "pool:p:decisions"])
async def test_decisions_are_numbered_after_part_of_their_records_was_lost(
    redis_url, open_at, lost
):
    store = open_at(redis_url)
    await store.fence(term=1)
    for _ in range(3):
        await store.add_decision("p", DECISION, term=1)
    with Redis.from_url(redis_url) as operator:
        operator.delete(f"{HASH_TAG}:{lost}")
    assert (await store.add_decision("p", DECISION, term=1)).sequence == 4


async def test_a_server_that_deletes_keys_when_it_is_full_is_named(redis_url, open_at, caplog):
    with Redis.from_url(redis_url) as operator:
        operator.config_set("maxmemory", "1gb")
        try:
            await open_at(redis_url).pools()
            assert "maxmemory-policy" not in caplog.text
            operator.config_set("maxmemory-policy", "allkeys-lru")
            await open_at(redis_url).pools()
        finally:
            operator.config_set("maxmemory-policy", "noeviction")
            operator.config_set("maxmemory", 0)
    assert "set maxmemory-policy to noeviction" in caplog.text


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("BUSY Redis is busy running a script.", StoreFault.UNREACHABLE),
        ("CLUSTERDOWN The cluster is down", StoreFault.UNREACHABLE),
        ("MASTERDOWN Link with MASTER is down", StoreFault.UNREACHABLE),
        ("TRYAGAIN Multiple keys request during rehashing of slot", StoreFault.UNREACHABLE),
        ("MOVED 3999 127.0.0.1:6381", StoreFault.DENIED),
        ("ERR unknown command", StoreFault.DENIED),
    ],
)
async def test_faults_that_pass_are_told_from_those_that_do_not(
    reply, fault, redis_url, open_at, monkeypatch
):
    """As redis-py reports a server's replies."""
    store = open_at(redis_url)

    async def answer(*_args, **_named):
        raise BaseParser.parse_error(reply)

    monkeypatch.setattr(store._link.redis, "execute_command", answer)
    assert (await fault_of(store.pools())).fault is fault


async def test_keys_of_another_program_are_rejected_and_left_alone(redis_url, open_at):
    with Redis.from_url(redis_url) as operator:
        operator.set(f"{HASH_TAG}:meta", "theirs")
        error = await fault_of(open_at(redis_url).fence(term=1))
        assert error.fault is StoreFault.FOREIGN
        assert operator.get(f"{HASH_TAG}:meta") == b"theirs"


@pytest.mark.parametrize(
    ("key", "field", "damage"),
    [
        ("pool:p:layouts", "1", b""),
        ("pool:p:layouts", "1", b"{}\n"),
        ("pool:p:layouts", "1", b"[]\n" + bytes(64)),
        ("pool:p:layouts", "1", b"\xff\xff\n" + bytes(64)),
        (
            "pool:p:layouts",
            "1",
            b'{"num_layers": 2, "num_experts": 6, "num_ranks": 2, "slots_of_rank": [4, 4]}\n'
            + bytes(64),
        ),
        (
            "pool:p:layouts",
            "1",
            b'{"num_layers": 2, "num_experts": 6, "num_ranks": 2, "slots_of_rank": [4, 4]}\n'
            + bytes(7),
        ),
        ("pool:p", "committed", b"2"),
        ("pool:p", "committed", b"one"),
    ],
)
async def test_a_senseless_layout_is_never_given_out(redis_url, open_at, key, field, damage):
    store = open_at(redis_url)
    await store.fence(term=1)
    await store.adopt("p", layout_of(1), term=1)
    with Redis.from_url(redis_url) as operator:
        operator.hset(f"{HASH_TAG}:{key}", field, damage)
    error = await fault_of(store.recall("p"))
    assert error.fault is StoreFault.DAMAGED
    assert "pool p cannot be read" in str(error)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}\n" + bytes(96),
        b'{"half_life_s": 0, "num_experts": 6, "num_layers": 2, "time_unix_s": 1, "weight_s": 1}\n'
        + bytes(96),
        b'{"half_life_s": 5, "num_experts": 5, "num_layers": 2, "time_unix_s": 1, "weight_s": 1}\n'
        + bytes(96),
        b'{"half_life_s": 5, "num_experts": 6, "num_layers": 2, "time_unix_s": 1, "weight_s": 1}\n'
        + np.full(12, np.inf).tobytes(),
    ],
)
async def test_a_senseless_average_is_never_given_out(redis_url, open_at, damage):
    store = open_at(redis_url)
    ones = AverageRecord(
        half_life_s=5.0, time_unix_s=9.0, weight_s=1.0, decayed_load=np.ones((2, 6))
    )
    await store.fence(term=1)
    await store.put_average("p", "slow", ones, term=1)
    with Redis.from_url(redis_url) as operator:
        operator.hset(f"{HASH_TAG}:pool:p:averages", "slow", damage)
    assert (await fault_of(store.recall("p"))).fault is StoreFault.DAMAGED


async def test_senseless_membership_and_decisions_are_never_given_out(redis_url, open_at):
    store = open_at(redis_url)
    await store.fence(term=1)
    await store.adopt("p", layout_of(1), term=1)
    with Redis.from_url(redis_url) as operator:
        operator.hset(f"{HASH_TAG}:pool:p", mapping={"epoch": 3, "workers": "{"})
        operator.xadd(f"{HASH_TAG}:pool:p:decisions", {"record": '{"accepted": true}'})
    assert (await fault_of(store.recall("p"))).fault is StoreFault.DAMAGED
    assert (await fault_of(store.decisions("p", limit=1))).fault is StoreFault.DAMAGED


@pytest.mark.parametrize("term", [2**31, 2**53 + 4, "seven"])
async def test_a_fence_that_no_leader_can_have_set_is_named_and_never_lowered(
    redis_url, open_at, term
):
    store = open_at(redis_url)
    await store.fence(term=1)
    with Redis.from_url(redis_url) as operator:
        operator.hset(f"{HASH_TAG}:meta", "term", term)
        # As float64, 2^53 + 3 is not below 2^53 + 4.
        for call in (store.fence(term=2), store.highest_term()):
            error = await fault_of(call)
            assert error.fault is StoreFault.DAMAGED
            assert "highest term" in str(error)
            assert "empty its database" in str(error)
        assert operator.hget(f"{HASH_TAG}:meta", "term") == str(term).encode()


async def test_all_keys_are_in_one_slot_of_a_cluster(redis_url, open_at):
    store = open_at(redis_url)
    await store.fence(term=1)
    await store.adopt("a", layout_of(1), term=1)
    await store.adopt("b}c{", layout_of(1), term=1)
    assert await store.pools() == ("a", "b}c{")
    with Redis.from_url(redis_url) as operator:
        slots = [key_slot(key) for key in operator.scan_iter()]
    assert len(slots) > 4
    assert len(set(slots)) == 1


@pytest.mark.parametrize(
    "end", ["layouts", "averages", "decisions", "commits", "audit", "%3Aaudit"]
)
async def test_a_pool_named_like_a_key_of_another_shares_nothing_with_it(redis_url, open_at, end):
    store = open_at(redis_url)
    await store.fence(term=1)
    for pool in (f"a:{end}", "a"):
        await store.adopt(pool, layout_of(1), term=1)
        await store.add_decision(
            pool,
            DecisionRecord(accepted=True, reason=pool, base_generation=1, time_unix_s=1.0),
            term=1,
        )
    await store.forget(f"a:{end}", term=1)
    assert await store.pools() == ("a",)
    assert (await store.recall("a")).committed.generation == 1
    assert [one.reason for one in await store.decisions("a", limit=9)] == ["a"]


async def test_of_two_balancers_that_commit_at_once_exactly_one_wins(redis_url, open_at):
    one, other = open_at(redis_url), open_at(redis_url)
    await one.fence(term=1)
    await one.adopt("p", layout_of(1), term=1)
    for generation in (2, 3):
        await one.put_proposed("p", layout_of(generation), term=1)
    outcomes = await asyncio.gather(
        one.commit("p", 2, previous=1, term=1),
        other.commit("p", 3, previous=1, term=1),
        return_exceptions=True,
    )
    assert sorted(type(outcome) for outcome in outcomes if outcome) == [StoreConflictError]
    assert sum(outcome is None for outcome in outcomes) == 1


async def test_a_cancelled_step_does_not_mix_up_the_next_answers(redis_server, open_at):
    store = open_at(redis_server.url)
    await store.fence(term=1)
    await store.adopt("p", layout_of(1), term=1)
    redis_server.pause()
    waiting = [asyncio.create_task(store.recall("p")) for _ in range(4)]
    await asyncio.wait(waiting, timeout=0.1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    redis_server.resume()
    assert await store.highest_term() == 1
    assert await store.pools() == ("p",)
    assert (await store.recall("p")).committed.generation == 1


async def test_a_step_that_is_cancelled_ends_at_once_wherever_it_is(redis_server, open_at):
    # The cancellation of a term's pools must not be swallowed: they would hang or continue.
    moment, num_cancelled = 0, 0
    while True:
        store = open_at(redis_server.url)
        step = asyncio.create_task(store.pools())
        for _ in range(moment):
            await asyncio.sleep(0)
        if step.done():
            break
        step.cancel()
        (outcome,) = await asyncio.gather(step, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), f"{moment} turns of the loop later"
        num_cancelled += 1
        moment += max(1, moment // 8)
    assert num_cancelled > 10


async def test_what_was_written_outlives_a_kill_of_the_server(redis_server, open_at):
    store = open_at(redis_server.url)
    await store.fence(term=2)
    await store.adopt("p", layout_of(4), term=2)
    redis_server.kill()
    redis_server.start()
    again = open_at(redis_server.url)
    assert (await again.recall("p")).committed.generation == 4
    assert await again.highest_term() == 2


@pytest.mark.parametrize(
    ("switch", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_without_redis_these_tests_are_skipped_unless_it_is_required(monkeypatch, switch, outcome):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("EQUIPOISE_REQUIRE_REDIS", switch)
    with pytest.raises(outcome, match="apt-get install redis-server"):
        require_redis()

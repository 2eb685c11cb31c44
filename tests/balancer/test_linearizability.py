"""Requests of operators and committed layouts, as balancers see them at a Redis that fails.

One-way partitions are made by a TCP proxy for each link, which holds back requests or answers, and,
where this machine lets a process have a network namespace, also by packets that are dropped.
EQUIPOISE_HISTORIES sets how many histories are checked; `make linearizability` checks more.
"""

import asyncio
import os
import random
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import pytest
from redis import Redis

from equipoise.balancer.store import redis_scripts
from tests.support.linearizability import (
    UNKNOWN,
    Operation,
    UndecidedError,
    is_linearizable,
)
from tests.support.links import IN_NAMESPACE, Proxies, namespace_fault
from tests.support.redis_replica import promote, replicated, until_replicated
from tests.support.redis_server import require_redis
from tests.support.store_contract import State, step
from tests.support.store_histories import TIMEOUT_S, Client, is_sound
from tests.support.store_histories import history_of as history_with_promotions
from tests.support.tcp_proxy import TcpProxy

HISTORIES = int(os.environ.get("EQUIPOISE_HISTORIES", "3"))
LENGTH = 40


async def live(client, chance, generations):
    """Do what a leader does, in a random order; the generations are used up by all."""
    await client.do("fence")
    for _ in range(LENGTH // 2):
        await client.act(chance, generations)
        await asyncio.sleep(chance.uniform(0, 0.02))


async def disturb(chance, server, proxies, history):
    """Partition, pause and restart, until cancelled; nothing stays broken."""
    try:
        while True:
            await asyncio.sleep(chance.uniform(0.02, 0.2))
            proxy, duration_s = chance.choice(proxies), chance.uniform(0.0, 1.5 * TIMEOUT_S)
            match chance.randrange(4):
                case 0 | 1:
                    proxy.hold(chance.choice(["up", "down"]))
                    await asyncio.sleep(duration_s)
                    proxy.heal()
                case 2:
                    server.pause()
                    await asyncio.sleep(duration_s)
                    server.resume()
                case 3:
                    called_s = asyncio.get_running_loop().time()
                    server.kill()
                    await asyncio.to_thread(server.start)
                    returned_s = asyncio.get_running_loop().time()
                    restart = Operation(
                        what=("new server",), called_s=called_s, returned_s=returned_s, result="ok"
                    )
                    history.append(restart)
    finally:
        for proxy in proxies:
            proxy.heal()
        server.resume()
        server.start()


@asynccontextmanager
async def closing(*clients):
    try:
        yield
    finally:
        for client in clients:
            await client.store.close()


async def history_of(server, seed):
    """What two balancers did, of which the second one took over while the server failed."""
    chance, history, generations = random.Random(seed), [], iter(range(1, 10_000))
    async with TcpProxy(server.port) as one, TcpProxy(server.port) as other:
        first = Client(f"127.0.0.1:{one.port}", history, term=1)
        second = Client(f"127.0.0.1:{other.port}", history, term=2)
        async with closing(first, second):
            await first.do("fence")
            async with asyncio.TaskGroup() as tasks:
                weather = tasks.create_task(disturb(chance, server, [one, other], history))
                last = tasks.create_task(live(first, random.Random(seed + 1), generations))
                await asyncio.sleep(TIMEOUT_S)
                await live(second, random.Random(seed + 2), generations)
                await last
                weather.cancel()
    return history


@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_two_balancers_at_a_server_that_fails_leave_a_linearizable_history(
    redis_server, seed
):
    history = await history_of(redis_server, seed)
    known = [one for one in history if one.result is not UNKNOWN]
    assert len(known) > LENGTH, "the faults left something to check"
    is_sound = is_linearizable(history, step, State())
    assert is_sound


@pytest.mark.parametrize(
    ("script", "good", "bad"),
    [
        ("OWN_TERM", "term ~= highest_term or", ""),
        ("FENCE", "tonumber(term) <= tonumber(highest_term)", "false"),
        ("ADD_AUDIT", "latest ~= tonumber(ARGV[4])", "false"),
        ("ADD_AUDIT", "if ARGV[7] ~= '' then", "if false then"),
        ("RECALL", "layout(committed), proposed", "layout(proposed), proposed"),
        ("ADOPT", "redis.call('HSET', pool, 'committed', generation)", ""),
        ("PUT_MEMBERSHIP", "tonumber(latest) > tonumber(epoch)", "false"),
        (
            "RESTORE",
            "tonumber(highest) > tonumber(redis.call('HGET', pool, 'highest') or '0')",
            "true",
        ),
    ],
)
async def test_a_store_that_breaks_its_contract_is_found(
    redis_server, monkeypatch, script, good, bad
):
    sound = getattr(redis_scripts, script)
    assert good in sound
    monkeypatch.setattr(redis_scripts, script, sound.replace(good, bad))
    for seed in range(10):  # Faults may keep a balancer from what would show it.
        history = await history_of(redis_server, seed)
        with suppress(UndecidedError):
            if not is_linearizable(history, step, State()):
                return
        redis_server.restart_empty()
    pytest.fail("not found in ten histories")


@pytest.mark.parametrize("is_replicated", [True, False])
async def test_a_failover_loses_what_the_replica_lacked_and_nothing_else(tmp_path, is_replicated):
    history = []
    async with replicated(tmp_path) as (primary, link, replica):
        first = Client(f"127.0.0.1:{primary.port}", history, term=1)
        second = Client(f"127.0.0.1:{replica.port}", history, term=2)
        async with closing(first, second):
            for what in (("fence",), ("propose", 1), ("commit", 1, None), ("pause", "ann", 0)):
                await first.do(*what)
            with Redis.from_url(primary.url) as client:
                await until_replicated(client)
                if not is_replicated:
                    link.hold()
                await first.do("pause", "bob", 1)
                if is_replicated:
                    await until_replicated(client)
            promote(replica)
            for what in (("fence",), ("recall",)):
                assert await second.do(*what) is not UNKNOWN
            assert await second.do("pause", "eve", second.latest_audit) is not UNKNOWN
    assert is_linearizable(history, step, State()) == is_replicated


async def test_promotions_continue_from_one_moment_of_the_branch_before(tmp_path):
    require_redis()
    history, counts = await history_with_promotions(tmp_path, 0, links=Proxies(), num_promotions=1)
    assert counts["promotions"] == 1
    assert counts["operations"] - counts["unknown"] > LENGTH
    assert is_sound(history)


def test_promotions_are_sound_while_packets_are_dropped_one_way():
    require_redis()
    if fault := namespace_fault():
        pytest.skip(f"no network namespace on this machine: {fault}")
    module = (sys.executable, "-m", "tests.support.store_histories")
    words = [*IN_NAMESPACE, *module, "--histories=1", "--promotions=1", "--namespace"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 promotions" in done.stdout


async def test_a_replica_that_lost_what_it_had_acknowledged_is_found(tmp_path):
    require_redis()

    def forget(replica):
        with Redis.from_url(replica.url) as client:
            client.config_set("replica-read-only", "no")
            client.flushall()

    for seed in range(5):
        history, _ = await history_with_promotions(
            tmp_path / str(seed), seed, links=Proxies(), num_promotions=1, before=forget
        )
        if not is_sound(history):
            return
    pytest.fail("not found in five histories")

"""Requests of operators and committed layouts, as two balancers see them in a Redis that fails.

One-way partitions are made by a TCP proxy for each balancer, which holds back requests or answers;
network namespaces would need privileges. EQUIPOISE_HISTORIES sets how many histories are checked.
"""

import asyncio
import os
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import pytest
from redis import Redis

from equipoise.balancer.store import redis_scripts
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.store import StoreConflictError, StoreError, TermOverError
from equipoise.pool.records import Hold
from tests.support.linearizability import UNKNOWN, Operation, UndecidedError, is_linearizable
from tests.support.redis_replica import promote, replicated, until_replicated
from tests.support.store_records import AN_ORDER, layout_of
from tests.support.tcp_proxy import TcpProxy

HISTORIES = int(os.environ.get("EQUIPOISE_HISTORIES", "3"))
TIMEOUT_S = 0.5
LENGTH = 40


@dataclass(frozen=True, slots=True)
class State:
    """What a store holds of one pool, as its contract says."""

    term: int = 0
    proposed: frozenset = frozenset()
    highest: int = 0
    committed: int | None = None
    num_audit: int = 0
    hold: str = ""


def step(state, what):
    """The contract of the store: the next state and the result of an operation."""
    name, *arguments = what
    if name in {"committed", "hold"}:
        return state, getattr(state, name)
    *arguments, term = arguments
    if term < state.term:
        return state, "over"
    return WRITES[name](replace(state, term=term), *arguments)


def propose(state, generation):
    if generation in state.proposed:
        return state, "ok"
    if generation <= state.highest:
        return state, "conflict"
    return replace(state, proposed=state.proposed | {generation}, highest=generation), "ok"


def commit(state, generation, previous):
    if state.committed == generation:
        return state, "ok"
    if state.committed != previous or generation not in state.proposed:
        return state, "conflict"
    return replace(state, committed=generation), "ok"


def pause(state, who):
    sequence = state.num_audit + 1
    return replace(state, hold=who, num_audit=sequence), sequence


WRITES = {
    "fence": lambda state: (state, "ok"),
    "propose": propose,
    "commit": commit,
    "pause": pause,
}


class Client:
    """A balancer's store, which records what it is asked and what it answers."""

    def __init__(self, port, history, *, term) -> None:
        self.store = RedisStore(f"redis://127.0.0.1:{port}/0", timeout_s=TIMEOUT_S)
        self.history, self.term = history, term
        self.calls = {
            "fence": lambda: self.store.fence(term=self.term),
            "committed": lambda: self.store.committed("p"),
            "hold": lambda: self.store.hold("p"),
            "propose": lambda g: self.store.put_proposed("p", layout_of(g), term=self.term),
            "commit": lambda g, old: self.store.commit("p", g, previous=old, term=self.term),
            "pause": self._pause,
        }

    async def _pause(self, who):
        record = replace(AN_ORDER, who=who)
        added = await self.store.add_audit("p", record, hold=Hold(paused=who), term=self.term)
        return added.sequence

    async def do(self, name, *arguments):
        """Carry out an operation and record it; returns its result."""
        loop = asyncio.get_running_loop()
        called_s, result = loop.time(), UNKNOWN
        try:
            result = await self.calls[name](*arguments)
            if name == "committed":
                result = result.generation if result is not None else None
            elif name == "hold":
                result = result.paused
            elif name != "pause":
                result = "ok"
        except TermOverError:
            result = "over"
        except StoreConflictError:
            result = "conflict"
        except StoreError:
            pass
        what = (name, *arguments)
        if name not in {"committed", "hold"}:
            what = (*what, self.term)
        times = {} if result is UNKNOWN else {"returned_s": loop.time()}
        self.history.append(Operation(what=what, called_s=called_s, result=result, **times))
        return result

    async def live(self, chance, generations):
        """Do what a leader does, in a random order; the generations are used up by all."""
        await self.do("fence")
        committed = None
        for _ in range(LENGTH):
            match chance.randrange(4):
                case 0:
                    committed = await self.do("committed")
                case 1:
                    await self.do("hold")
                case 2:
                    await self.do("pause", f"{self.term}-{chance.randrange(1000)}")
                case 3:
                    generation = next(generations)
                    if await self.do("propose", generation) == "ok" and committed is not UNKNOWN:
                        done = await self.do("commit", generation, committed)
                        committed = generation if done == "ok" else committed
            await asyncio.sleep(chance.uniform(0, 0.02))


async def disturb(chance, server, proxies):
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
                    server.kill()
                    await asyncio.to_thread(server.start)
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
        first, second = Client(one.port, history, term=1), Client(other.port, history, term=2)
        async with closing(first, second):
            await first.do("fence")
            async with asyncio.TaskGroup() as tasks:
                weather = tasks.create_task(disturb(chance, server, [one, other]))
                last = tasks.create_task(first.live(random.Random(seed + 1), generations))
                await asyncio.sleep(TIMEOUT_S)
                await second.live(random.Random(seed + 2), generations)
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
        ("PRELUDE", "tonumber(term) < tonumber(highest_term)", "false"),
        ("ADD_AUDIT", "if ARGV[6] ~= '' then", "if false then"),
        (
            "COMMITTED",
            "redis.call('HGET', pool, 'committed')",
            "redis.call('HGET', pool, 'highest')",
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
        first = Client(primary.port, history, term=1)
        second = Client(replica.port, history, term=2)
        async with closing(first, second):
            for what in (("fence",), ("propose", 1), ("commit", 1, None), ("pause", "ann")):
                await first.do(*what)
            with Redis.from_url(primary.url) as client:
                await until_replicated(client)
                if not is_replicated:
                    link.hold()
                await first.do("pause", "bob")
                if is_replicated:
                    await until_replicated(client)
            promote(replica)
            for what in (("fence",), ("committed",), ("hold",), ("pause", "eve")):
                assert await second.do(*what) is not UNKNOWN
    assert is_linearizable(history, step, State()) == is_replicated

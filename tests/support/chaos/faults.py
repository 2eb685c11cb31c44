"""Inject the faults of a plan and undo them: one function per kind."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import psutil
import redis.asyncio

from equipoise.wire.messages import PROTOCOL_VERSION
from equipoise.wire.seal import seal
from equipoise_api.v1 import worker_link_pb2, worker_link_pb2_grpc
from tests.support.chaos.arena import WORKERS, Arena
from tests.support.chaos.gate import Stage
from tests.support.chaos.plan import Fault, Kind
from tests.support.forked_commands import is_planner

_HOUR_S = 3600
_LIMIT_BOUND_S = 60.0


async def suffer(arena: Arena, fault: Fault) -> None:
    """Inject the fault now; return when it is over and undone."""
    await SUFFER[fault.kind](arena, fault)


async def _worker_killed(arena: Arena, fault: Fault) -> None:
    await _ended(arena, WORKERS[fault.victim], fault, with_signal=signal.SIGKILL)


async def _worker_stopped(arena: Arena, fault: Fault) -> None:
    await _ended(arena, WORKERS[fault.victim], fault, with_signal=signal.SIGTERM)


async def _worker_hangs(arena: Arena, fault: Fault) -> None:
    await _paused(arena, WORKERS[fault.victim], fault.lasts_s)


async def _worker_stutters(arena: Arena, fault: Fault) -> None:
    """Stopped for a moment, again and again: a rank that is slow and not gone."""
    rng = random.Random(fault.draw)
    for _ in range(max(1, round(fault.lasts_s / 0.3))):
        await _paused(arena, WORKERS[fault.victim], rng.uniform(0.05, 0.4))
        await asyncio.sleep(rng.uniform(0.02, 0.2))


async def _balancer_killed(arena: Arena, fault: Fault) -> None:
    await _ended(arena, await arena.leader(), fault, with_signal=signal.SIGKILL)


async def _balancer_hangs(arena: Arena, fault: Fault) -> None:
    await _paused(arena, await arena.leader(), fault.lasts_s)


async def _follower_killed(arena: Arena, fault: Fault) -> None:
    leader = await arena.leader()
    follower = next(name for name in arena.balancers if name != leader)
    await _ended(arena, follower, fault, with_signal=signal.SIGKILL)


async def _planner_killed(arena: Arena, fault: Fault) -> None:
    """Each process in which the leader plans, as soon as it is there, until the fault is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(fault.lasts_s):
            while True:
                for planner in await _planners(arena):
                    with suppress(psutil.NoSuchProcess):
                        planner.kill()
                await asyncio.sleep(0.1)


async def _planner_hangs(arena: Arena, fault: Fault) -> None:
    async with AsyncExitStack() as hanging:
        for planner in await _planners(arena):
            await hanging.enter_async_context(_stopped(planner.pid))
        await asyncio.sleep(fault.lasts_s)


async def _planners(arena: Arena) -> list[psutil.Process]:
    """The processes in which the leader plans now; it may be gone meanwhile."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(arena.fleet.pid(await arena.leader())).children(recursive=True)
        return [child for child in children if is_planner(child)]
    return []


async def _link_cut(arena: Arena, fault: Fault) -> None:
    for name in arena.balancers:
        arena.relays[name].cut(WORKERS[fault.victim] if fault.draw % 2 else "")
    await asyncio.sleep(0)


def _weather(**changes: float) -> Callable[[Arena, Fault], Awaitable[None]]:
    """Bad weather between the balancers and one worker, or all of them."""

    async def suffered(arena: Arena, fault: Fault) -> None:
        relays = [arena.relays[name] for name in arena.balancers]
        worker = WORKERS[fault.victim] if fault.draw % 2 else ""
        for relay in relays:
            weather = (
                relay.weather_of.setdefault(worker, type(relay.weather)())
                if worker
                else (relay.weather)
            )
            weather.rng.seed(fault.draw)
            for name, value in changes.items():
                setattr(weather, name, value)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            for relay in relays:
                relay.clear()
                # What was lost on a live stream is gone; what a real network loses ends it.
                relay.cut(worker)

    return suffered


def _transfers(**changes: float) -> Callable[[Arena, Fault], Awaitable[None]]:
    """Bad weather on experts or latents that ranks fetch from all workers."""

    async def suffered(arena: Arena, fault: Fault) -> None:
        relays = [arena.relays[name] for name in WORKERS]
        for relay in relays:
            relay.weather.rng.seed(fault.draw)
            for name, value in changes.items():
                setattr(relay.weather, name, value)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            for relay in relays:
                relay.clear()

    return suffered


async def _handover_killed(arena: Arena, fault: Fault) -> None:
    async with _at_a_stage(arena, fault) as (victim, may_go_on):
        if arena.running(victim):
            await arena.fleet.stop(victim, with_signal=signal.SIGKILL)
        may_go_on.set()
        await asyncio.sleep(fault.lasts_s)
        if not arena.running(victim):
            await arena.start(victim)


async def _handover_hangs(arena: Arena, fault: Fault) -> None:
    async with _at_a_stage(arena, fault) as (victim, may_go_on):
        if arena.running(victim):
            async with _stopped(arena.fleet.pid(victim)):
                may_go_on.set()
                await asyncio.sleep(fault.lasts_s)


@asynccontextmanager
async def _at_a_stage(arena: Arena, fault: Fault) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A rank that takes part in a handover, or a peer of one, while the handover waits.

    Which one and at which stage the draw says; the handover goes on when the event is set. If none
    reaches the stage in time, it is done to a rank all the same.
    """
    stages = list(Stage)
    with arena.gate(stages[fault.draw % len(stages)]) as gate:
        with suppress(TimeoutError):
            async with asyncio.timeout(fault.lasts_s):
                await gate.reached.wait()
        of_prefill, is_peer = bool(fault.victim % 2), bool(fault.victim // 2)
        rank = gate.ranks.get(of_prefill)
        victim = gate.peer(of_prefill=of_prefill) if is_peer or rank is None else rank
        yield victim, gate.opened


async def _stranger(arena: Arena, fault: Fault) -> None:
    """A process of another release claims to be one of the workers, or a new one."""
    rng = random.Random(fault.draw)
    hello = worker_link_pb2.Hello(
        pool=arena.pool_of(WORKERS[fault.victim]),
        worker=rng.choice([WORKERS[fault.victim], "worker-9"]),
        boot_id="stranger",
        node="elsewhere",
        address="127.0.0.3:1",
        rendezvous_address="127.0.0.3:2",
        slots_per_rank=12,
        num_ranks=4,
        checkpoint_fingerprint="0badcafe",
        experts_digest=bytes(16),
        protocol_version=rng.choice([0, 1, PROTOCOL_VERSION, 99]),
        model=worker_link_pb2.ModelShape(
            num_layers=4, num_experts=32, num_groups=8, expert_bytes=rng.randrange(2**40)
        ),
    )
    # Fields of a later release, which this one does not know.
    hello.MergeFromString(b"\xba\x3e\x05later")
    address = arena.relays[await arena.leader()].listen
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect()
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(fault.lasts_s):
                await call.write(seal(worker_link_pb2.ConnectRequest(hello=hello)))
                while await call.read() is not grpc.aio.EOF:
                    pass
        call.cancel()


async def _clock_jumps(arena: Arena, fault: Fault) -> None:
    offset_s = _HOUR_S if fault.draw % 2 else -_HOUR_S
    arena.clock_file.write_text(f"{offset_s:+d}")
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        arena.clock_file.write_text("+0")


async def _redis_killed(arena: Arena, fault: Fault) -> None:
    await asyncio.to_thread(arena.redis.kill)
    await asyncio.sleep(fault.lasts_s)
    await asyncio.to_thread(arena.redis.start)


async def _redis_hangs(arena: Arena, fault: Fault) -> None:
    arena.redis.pause()
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        arena.redis.resume()


async def _redis_full(arena: Arena, fault: Fault) -> None:
    await _limit_redis(arena, 1)
    await asyncio.sleep(fault.lasts_s)
    await _limit_redis(arena, 0)


async def _limit_redis(arena: Arena, num_bytes: int) -> None:
    """Have it take so much and no more; one that another fault has stopped is waited for.

    One that was killed, and is started again, has no limit.
    """
    client = redis.asyncio.Redis.from_url(arena.redis.url, socket_timeout=1.0)
    async with client, asyncio.timeout(_LIMIT_BOUND_S):
        while arena.redis.running:
            with suppress(redis.ConnectionError, redis.TimeoutError):
                await client.config_set("maxmemory", num_bytes)
                return
            await asyncio.sleep(0.1)


async def _redis_emptied(arena: Arena, fault: Fault) -> None:
    await asyncio.to_thread(arena.redis.restart_empty)
    await asyncio.sleep(fault.lasts_s)


async def _disk_full(arena: Arena, fault: Fault) -> None:
    """The balancer's files cannot grow: SQLite gets "file too large" where a disk says "full"."""
    process = psutil.Process(arena.fleet.pid(await arena.leader()))
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


async def _ended(arena: Arena, name: str, fault: Fault, *, with_signal: signal.Signals) -> None:
    """End a process, and start it again when the fault is over."""
    if not arena.running(name):
        return  # Another fault has ended it, and will start it again.
    await arena.fleet.stop(name, with_signal=with_signal)
    await asyncio.sleep(fault.lasts_s)
    if not arena.running(name):
        await arena.start(name)


async def _paused(arena: Arena, name: str, for_s: float) -> None:
    if not arena.running(name):
        return
    async with _stopped(arena.fleet.pid(name)):
        await asyncio.sleep(for_s)


@asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


SUFFER: dict[Kind, Callable[[Arena, Fault], Awaitable[None]]] = {
    Kind.WORKER_KILLED: _worker_killed,
    Kind.WORKER_HANGS: _worker_hangs,
    Kind.WORKER_STOPPED: _worker_stopped,
    Kind.WORKER_STUTTERS: _worker_stutters,
    Kind.BALANCER_KILLED: _balancer_killed,
    Kind.BALANCER_HANGS: _balancer_hangs,
    Kind.FOLLOWER_KILLED: _follower_killed,
    Kind.PLANNER_KILLED: _planner_killed,
    Kind.PLANNER_HANGS: _planner_hangs,
    Kind.LINK_CUT: _link_cut,
    Kind.LINK_PARTED: _weather(parted=True),
    Kind.LINK_LOSSY: _weather(dropped=0.2),
    Kind.LINK_SLOW: _weather(delay_s=0.5),
    Kind.LINK_ECHOES: _weather(doubled=0.5),
    Kind.LINK_SHUFFLED: _weather(swapped=0.3),
    Kind.LINK_GARBLED: _weather(garbled=0.2),
    Kind.EXPERTS_CORRUPTED: _transfers(corrupted=0.5),
    Kind.TRANSFER_STALLS: _transfers(stalled=True),
    Kind.STRANGER: _stranger,
    Kind.CLOCK_JUMPS: _clock_jumps,
    Kind.REDIS_KILLED: _redis_killed,
    Kind.REDIS_HANGS: _redis_hangs,
    Kind.REDIS_FULL: _redis_full,
    Kind.REDIS_EMPTIED: _redis_emptied,
    Kind.DISK_FULL: _disk_full,
    Kind.LATENTS_CORRUPTED: _transfers(latents_corrupted=0.5),
    Kind.LATENTS_STALL: _transfers(latents_stalled=True),
    Kind.LATENTS_CUT: _transfers(latents_cut=0.5),
    Kind.HANDOVER_KILLED: _handover_killed,
    Kind.HANDOVER_HANGS: _handover_hangs,
}

"""Workers with a valid credential of the pool itself, which lie about themselves.

Honest workers must form their pool while the liar is there, and in whatever state it leaves it.
"""

import asyncio
from dataclasses import replace
from typing import Any

import grpc

from equipoise.planning.arrays import EMPTY
from equipoise.planning.moves import checksums_digest
from equipoise.planning.phase import Phase
from equipoise.trust.identity import Identity, Role
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.convert import from_balancer, to_balancer
from equipoise.wire.messages import GroupLost, Heartbeat, Hello, Serving, WorkerMessage
from equipoise_api.v1 import worker_link_pb2
from tests.simulation.balancer import UNIX_S
from tests.simulation.byzantine import say
from tests.simulation.experts import SimCheckpoint
from tests.simulation.fleet import PLACES, POOL, SLOTS
from tests.simulation.loop import Process
from tests.simulation.network import Connection

NAME = "liar"
IDENTITY = (Identity(role=Role.WORKER, pool=POOL, worker=NAME),)
EVERY_S = 0.7

NUMBERS = (1, 2**20 + 7, 2**31, 2**32, 2**32 + 1, 2**53 - 1, 2**53)
"""What it claims to have reached, beside the highest number that is plausible."""


def start(world: Any, how: str) -> Process:
    """Start a liar: of numbers, of lost groups, or of what it is."""
    process = Process(world.loop, NAME)
    process.spawn(_leap(world, process) if how == "leap" else _stay(world, process, how))
    return process


def _hello(world: Any, **changes: Any) -> Hello:
    """What an honest worker with the same checkpoint would say."""
    checkpoint = SimCheckpoint(world.shape)
    return replace(
        Hello(
            pool=POOL,
            worker=NAME,
            boot_id=f"{NAME}-{world.port()}",
            node="node-0",
            address=f"{NAME}:1",
            rendezvous_address=f"{NAME}:2",
            phase=world.phase,
            model=world.shape,
            slots_per_rank=SLOTS + world.pooled,
            num_places=PLACES * world.pooled,
            num_ranks=world.schedule.num_workers,
            checkpoint_fingerprint=checkpoint.fingerprint,
            experts_digest=checksums_digest(checkpoint.payload_checksums),
            kernels="simulated",
        ),
        **changes,
    )


async def _leap(world: Any, process: Process) -> None:
    """Claim numbers at their limits: terms, epochs and generations, of its own and of others."""
    turn = 0
    while True:
        plausible = int((UNIX_S + world.loop.time()) * 1000) - 1000
        number = (*NUMBERS, plausible)[turn % (len(NUMBERS) + 1)]
        # Not both: a balancer believes nothing before its lease is renewed if a term is claimed.
        claims = {"highest_epoch": number, "highest_generation": number}
        hello = _hello(world, **(claims if turn % 3 else {"highest_term": number}))
        if turn % 2:
            lost = GroupLost(epoch=number, reason="a lie", expert_of_slot=None, generation=number)
            hello = replace(hello, group_lost=lost)
        if turn % 5 == 4:
            hello = replace(hello, worker="w0")
        beat = Heartbeat(epoch=number, generation=number, staged_generation=number, sequence=number)
        messages = [to_balancer(one).SerializeToString() for one in (hello, beat)]
        for address in world.balancer_addresses:
            if await say(world, process, address, messages, identity=IDENTITY):
                world.effects.add("lie")
        turn += 1
        await asyncio.sleep(EVERY_S)


async def _stay(world: Any, process: Process, how: str) -> None:
    """Keep a stream to each balancer in turn for as long as it lasts."""
    turn = 0
    while True:
        address = world.balancer_addresses[turn % len(world.balancer_addresses)]
        turn += 1
        connection = world.network.connect(process, address, "Connect")
        connection.identity = IDENTITY
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_converse(world, connection, how))
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError, StopAsyncIteration):
            pass
        connection.cancel()
        await asyncio.sleep(0.2)


async def _converse(world: Any, connection: Connection, how: str) -> None:
    differs: dict[str, dict[str, Any]] = {
        "shape": {"slots_per_rank": world.shape.num_experts},
        "alone": {"slots_per_rank": world.shape.num_experts, "num_ranks": 1},
        "phase": {"phase": Phase.PREFILL if world.phase is Phase.MIXED else Phase.MIXED},
        "checkpoint": {"checkpoint_fingerprint": "0" * 32},
        "kernels": {"kernels": "others"},
    }
    hello = _hello(world, **differs.get(how, {}))

    def send(message: WorkerMessage) -> None:
        connection.send(to_balancer(message).SerializeToString())

    send(hello)
    beats = asyncio.create_task(_beat(send))
    try:
        while True:
            answer = worker_link_pb2.ConnectResponse.FromString(await connection.answers.get())
            message = from_balancer(answer, hello=hello, running=None)
            world.effects.add("lie")
            if isinstance(message, JoinEpoch):
                send(_serving(world, message))
                if how == "loses":
                    await asyncio.sleep(0.1)
                    send(_lost(message))
    finally:
        beats.cancel()


async def _beat(send: Any) -> None:
    """Show that it is alive; it never runs anything."""
    sequence = 0
    while True:
        sequence += 1
        await asyncio.sleep(1.0)
        send(Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=sequence))


def _serving(world: Any, join_epoch: JoinEpoch) -> Serving:
    layout, table = join_epoch.layout, SimCheckpoint(world.shape).payload_checksums
    own = layout.expert_of_slot[:, layout.own_slots(join_epoch.rank)]
    return Serving(
        epoch=join_epoch.epoch,
        rank=join_epoch.rank,
        generation=layout.generation,
        checksums=table[[[layer] for layer in range(len(own))], own] * (own != EMPTY)[..., None],
        layout_digest=layout.digest(),
        expert_checksums=table,
    )


def _lost(join_epoch: JoinEpoch) -> GroupLost:
    return GroupLost(
        epoch=join_epoch.epoch,
        reason="a lie",
        expert_of_slot=None,
        generation=join_epoch.layout.generation,
    )

"""Callers with a credential of another pool, who say whatever they like; a leader of the past."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from equipoise.planning.layout import Layout
from equipoise.trust.identity import Identity, Role
from equipoise.wire.balancer_messages import Abort
from equipoise.wire.convert import to_balancer, to_worker
from equipoise.wire.messages import GroupLost, Heartbeat, Hello
from tests.simulation.loop import Process
from tests.support.mutations import Mutator

POOL = "other"
EVERY_S = 0.7

PUSHES = 20
"""Attempts of an old leader, until its worker obeys a later term."""

IDENTITY = (Identity(role=Role.WORKER, pool=POOL, worker="evil"),)


def hello(world: Any, **changes: Any) -> Hello:
    """A valid Hello of a worker of another pool."""
    return replace(
        Hello(
            pool=POOL,
            worker="evil",
            boot_id="evil-1",
            node="evil",
            address="evil:1",
            rendezvous_address="evil:2",
            model=world.shape,
            slots_per_rank=world.shape.num_experts,
            num_ranks=2,
            checkpoint_fingerprint="e" * 32,
            experts_digest=bytes(16),
        ),
        **changes,
    )


def claim_terms(world: Any, how: str) -> None:
    """Say, again and again, that a higher term was seen. It does not end with the faults."""
    process = Process(world.loop, "byzantine")

    def term() -> int:
        highest = max(
            (one.elector.state.highest_term for one in world.living_balancers()), default=0
        )
        return {
            "next": highest + 1,
            "huge": 2**53,
            "lease": 2**31 - 1,
            "leap": highest + 2**20,
        }[how]

    async def claim() -> None:
        while True:
            for address in world.balancer_addresses:
                message = to_balancer(hello(world, highest_term=min(2**53, term())))
                messages = [message.SerializeToString()]
                if await say(world, process, address, messages, identity=IDENTITY):
                    world.effects.add("byzantine_term")
            await asyncio.sleep(EVERY_S)

    process.spawn(claim())


def make_noise(world: Any, seed: int) -> None:
    """Mutated messages for a few seconds: of its own name, of another's, or none at all."""
    process = Process(world.loop, "byzantine")
    rng, mutator = random.Random(seed), Mutator(seed)

    async def noise() -> None:
        for _ in range(6):
            first = hello(world)
            if rng.random() < 0.3:
                first = replace(first, pool="main", worker=rng.choice(("w0", "w1", "evil")))
            if rng.random() < 0.3:
                epoch = rng.choice((1, 2, 2**31, 2**53))
                lost = GroupLost(epoch=epoch, reason="noise", expert_of_slot=None, generation=epoch)
                first = replace(first, group_lost=lost)
            beat = Heartbeat(epoch=1, generation=9, staged_generation=9, sequence=1)
            messages = [
                mutated.SerializeToString()
                for message in (to_balancer(first), to_balancer(beat), to_balancer(beat))
                if (mutated := mutator.mutated(message) if rng.random() < 0.7 else message)
            ]
            address = rng.choice(world.balancer_addresses)
            if await say(world, process, address, messages, identity=IDENTITY):
                world.effects.add("byzantine_noise")
            await asyncio.sleep(0.3)

    process.spawn(noise())


async def say(
    world: Any, process: Process, address: str, messages: list[bytes], *, identity: Any
) -> bool:
    """Open a stream, send messages, wait for an answer, and hang up; whether there was one."""
    connection = world.network.connect(process, address, "Connect")
    connection.identity = identity
    try:
        for message in messages:
            connection.send(message)
        async with asyncio.timeout(0.3):
            await connection.answers.get()
        is_answered = True
    except grpc.aio.AioRpcError as error:
        is_answered = error.code() is not grpc.StatusCode.UNAVAILABLE
    except (asyncio.InvalidStateError, TimeoutError, StopAsyncIteration):
        is_answered = False
    connection.cancel()
    return is_answered


async def push_of_the_term_before(world: Any, name: str) -> None:
    """Send a worker what only a leader whose term is over would send, once there is one."""
    for _ in range(PUSHES):
        worker = world.workers.get(name)
        term = world.observer.obeyed(worker) - 1 if worker is not None else 0
        calls = world.network.calls(worker.process, "Connect") if term > 0 else []
        old = Abort(term=term, epoch=1, generation=1, reason="sent by a leader of an earlier term")
        for call in calls:
            if call.is_open:
                call.answer(to_worker(old).SerializeToString())
                world.effects.add("old_leader")
                return
        await asyncio.sleep(EVERY_S)


def other_layout(layout: Layout, *, rank: int | None) -> Layout | None:
    """A layout that differs from another one outside the slots of a rank; None if there is none."""
    others = [
        slot
        for slot in range(layout.num_slots)
        if rank is None or slot // layout.slots_per_rank != rank
    ]
    one, other = others[0], others[-1]
    table = np.array(layout.expert_of_slot)
    if table[0, one] == table[0, other]:
        return None
    table[0, [one, other]] = table[0, [other, one]]
    try:
        return layout.with_placement(table, generation=layout.generation)
    except ValueError:
        return None

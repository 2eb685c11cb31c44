"""Real processes whose layers share places: from perLayer to pooled slots and back."""

import asyncio
import signal
from contextlib import asynccontextmanager, suppress

import grpc
import numpy as np
import pytest

from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.support.real_pool import (
    BOUND_S,
    check_tokens,
    mirrored,
    pool_of,
    under_load,
    undisturbed_tokens,
)
from tests.support.redis_server import RedisServer, require_redis

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NAMES = ("worker-0", "worker-1", "worker-2", "worker-3")
NUM_PLACES = 44
"""Of 4 layers x 32 experts: three of four ranks can hold them."""
NUM_SLOTS = 14

POLICY = """
apiVersion: equipoise.dev/v1alpha1
kind: BalancePolicy
defaults:
  planning:
    algorithm: global
    slots: {slots}
  judging:
    minGain: 0
    cooldown: 1s
"""


def slots_in_use(layout, *, places=NUM_PLACES):
    """Slots in use by layer and rank, int64 [layers, ranks]."""
    table = np.frombuffer(layout.expert_of_slot, dtype="<i4").reshape(layout.num_layers, -1)
    used = (table >= 0).reshape(layout.num_layers, layout.num_ranks, -1).sum(axis=2)
    assert (used.sum(axis=0) <= places).all()
    assert used.max() <= NUM_SLOTS
    return used


async def test_a_pool_goes_from_per_layer_to_pooled_slots_and_back_and_no_token_changes(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(slots="perLayer"))
    async with pool_of(
        *NAMES,
        folder=tmp_path,
        slots_per_rank=NUM_SLOTS,
        arguments=(f"--places={NUM_PLACES}",),
        balancer_arguments=(f"--policy={policy}",),
    ) as (pool, first):
        assert (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all()
        async with under_load(first) as traffic:
            await traffic.until_finished(6)
            generation = first.generation
            for slots, is_even in (("pooled", False), ("perLayer", True)):
                policy.write_text(POLICY.format(slots=slots))
                while (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all() != is_even:
                    later = await pool.until(
                        lambda status, least=generation: status.generation > least
                    )
                    generation = later.generation
                assert later.epoch == first.epoch, "no rank was lost"
                await traffic.until_finished(6)
    check_tokens(traffic, undisturbed_tokens())


async def test_ranks_that_share_places_survive_a_killed_one_and_no_token_changes(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(slots="pooled"))
    places = f"--places={NUM_PLACES}"
    async with pool_of(
        *NAMES,
        folder=tmp_path,
        slots_per_rank=NUM_SLOTS,
        arguments=(places,),
        balancer_arguments=(f"--policy={policy}",),
    ) as (pool, first):
        victim = first.ranks[1]
        async with under_load(first) as traffic:
            await traffic.until_finished(3)
            later = first
            while (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all():
                later = await pool.until(
                    lambda status, least=later.generation: status.generation > least
                )
            traffic.remove(victim.address)
            await pool.fleet.stop(victim.worker, with_signal=signal.SIGKILL)
            rest = {rank.worker for rank in first.ranks} - {victim.worker}
            after = await pool.serving(*rest, after_epoch=first.epoch)
            slots_in_use(await pool.layout())
            await traffic.until_finished(3)
            await pool.start_worker(victim.worker, places)
            await pool.serving(*NAMES, after_epoch=after.epoch)
            slots_in_use(await pool.layout())
            await traffic.until_finished(3)
            later = await pool.serving(*NAMES, after_epoch=after.epoch)
            assert not later.quarantined
    check_tokens(traffic, undisturbed_tokens())


async def test_ranks_of_unequal_places_hold_their_own_number_and_no_token_changes(tmp_path):
    """56 places for each of 4 layers x 32 experts on one rank, and hardly more than a quarter."""
    places = dict(zip(NAMES, (56, 36, 28, 40), strict=True))
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(slots="perLayer"))
    async with pool_of(
        *NAMES,
        folder=tmp_path,
        slots_per_rank=NUM_SLOTS,
        own={name: (f"--places={number}",) for name, number in places.items()},
        balancer_arguments=(f"--policy={policy}", "--min-assignments=10"),
    ) as (pool, first):
        of_rank = [places[rank.worker] for rank in first.ranks]
        assert [rank.num_places for rank in first.ranks] == of_rank
        per_layer = np.array(of_rank) // 4
        assert (slots_in_use(await pool.layout(), places=of_rank) == per_layer).all()
        async with (
            under_load(first) as traffic,
            places_watched(pool, places=of_rank) as generations,
        ):
            await traffic.until_finished(3)
            policy.write_text(POLICY.format(slots="pooled"))
            # Traffic may suit the present layout: nobody knows when a plan would change slots.
            await pin(pool, await pool.layout())
            held = await pool.until(lambda one: one.hold.at_pin and not one.HasField("rollout"))
            wanted = with_a_slot_moved(await pool.layout())
            await pin(pool, wanted)
            later = await pool.until(
                lambda one: one.generation > held.generation and not one.HasField("rollout")
            )
            assert (await pool.layout()).expert_of_slot == wanted.expert_of_slot
            assert (slots_in_use(wanted, places=of_rank) != per_layer).any()
            await traffic.until_finished(3)
            assert later.epoch == first.epoch, "no rank was lost"
        assert len(generations) > 1
    check_tokens(traffic, undisturbed_tokens())


@asynccontextmanager
async def places_watched(pool, *, places=NUM_PLACES):
    """Ask for the layout again and again: no rank may hold more than its places."""
    generations = set()

    async def ask():
        async with grpc.aio.insecure_channel(pool.address) as channel:
            stub = status_pb2_grpc.StatusStub(channel)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    layout = (await stub.GetLayout(status_pb2.GetLayoutRequest())).layout
                    slots_in_use(layout, places=places)
                    generations.add(layout.generation)
                await asyncio.sleep(0.02)

    asking = asyncio.create_task(ask())
    try:
        yield generations
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled(), asking.exception()


def with_a_slot_moved(layout):
    """One rank gives up a replica in a layer, and holds one expert more in another."""
    other = type(layout)()
    other.CopyFrom(layout)
    table = np.frombuffer(layout.expert_of_slot, "<i4").reshape(
        layout.num_layers, layout.num_ranks, -1
    )
    table = table.copy()
    for rank, layer in np.ndindex(layout.num_ranks, layout.num_layers):
        own, receiver = table[layer, rank], table[layer - 1, rank]
        counts = np.bincount(table[layer][table[layer] >= 0])
        given = [slot for slot, expert in enumerate(own) if expert >= 0 and counts[expert] > 1]
        if given and (receiver < 0).any():
            own[given[0]] = -1
            lacking = np.setdiff1d(np.arange(len(counts)), receiver)
            receiver[np.argmax(receiver < 0)] = lacking[0]
            other.expert_of_slot = table.tobytes()
            return other
    raise AssertionError("no rank has a replica and a free slot in another layer")


async def pin(pool, layout):
    async with grpc.aio.insecure_channel(pool.address) as channel:
        request = admin_pb2.PinRequest(reason="to be rolled out", layout=layout)
        answer = await admin_pb2_grpc.AdminStub(channel).Pin(request, timeout=BOUND_S)
    assert answer.outcome.accepted, answer.outcome.reason


async def layout_of_successor(pool):
    """The layout as soon as a new balancer has one."""
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                return await pool.layout()
            await asyncio.sleep(0.1)


async def test_shared_places_outlive_balancers_their_store_and_all_processes(tmp_path):
    require_redis()
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(slots="pooled") + "  waves: {maxMoves: 1}\n")
    places = f"--places={NUM_PLACES}"
    with RedisServer(tmp_path / "redis") as redis:
        balancer = (f"--store={redis.url}", f"--policy={policy}")
        async with pool_of(
            *NAMES,
            folder=tmp_path,
            slots_per_rank=NUM_SLOTS,
            arguments=(places,),
            balancer_arguments=balancer,
        ) as (pool, first):
            async with under_load(first) as traffic, places_watched(pool) as generations:
                later = first
                while (slots_in_use(await pool.layout()) == NUM_PLACES // 4).all():
                    later = await pool.until(
                        lambda status, least=later.generation: status.generation > least
                    )
                await pin(pool, await pool.layout())
                still = await pool.until(
                    lambda one: one.hold.at_pin and not one.HasField("rollout")
                )
                wanted = mirrored(await pool.layout())
                await pin(pool, wanted)
                # The balancer dies between the waves of a change of every slot.
                amid = await pool.until(lambda one: one.generation > still.generation)
                await pool.fleet.stop("balancer", with_signal=signal.SIGKILL)
                await traffic.until_finished(3)
                await pool.start_balancer(*balancer)
                done = await pool.until(
                    lambda one: (
                        one.health == status_pb2.POOL_HEALTH_SERVING
                        and one.hold.at_pin
                        and one.generation >= amid.generation
                        and not one.HasField("rollout")
                    )
                )
                assert (await pool.layout()).expert_of_slot == wanted.expert_of_slot
                assert done.epoch == first.epoch, "the ranks went on"
                # Its successor finds an empty store: the layout is what the workers run.
                await pool.fleet.stop("balancer", with_signal=signal.SIGKILL)
                redis.restart_empty()
                await pool.start_balancer(*balancer, "--interval-s=3600")
                found = await layout_of_successor(pool)
                assert found.expert_of_slot == wanted.expert_of_slot
                after = await pool.serving(*NAMES)
                assert after.epoch == first.epoch, "the ranks went on"
                await traffic.until_finished(3)
            assert len(generations) > 3
            check_tokens(traffic, undisturbed_tokens())
            # All processes end; the layout is in the store.
            for name in (*NAMES, "balancer"):
                await pool.fleet.stop(name, with_signal=signal.SIGKILL)
            await pool.start_balancer(*balancer, "--interval-s=3600")
            for name in NAMES:
                await pool.start_worker(name, places)
            again = await pool.serving(*NAMES, after_epoch=after.epoch)
            assert (await pool.layout()).expert_of_slot == wanted.expert_of_slot
            async with under_load(again) as traffic:
                await traffic.until_finished(3)
            check_tokens(traffic, undisturbed_tokens())

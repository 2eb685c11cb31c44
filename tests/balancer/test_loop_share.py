"""How much of the event loop's time one pool may take."""

import asyncio
from contextlib import contextmanager

import grpc
import pytest

from equipoise.balancer import loop_share
from equipoise.balancer.loop_share import LoopBudget, LoopShare, LoopShares
from equipoise.wire.balancer_messages import HeartbeatAck
from equipoise.wire.encoder import Encoder
from tests.support.balancer_links import linked


def test_who_takes_more_than_its_share_waits_until_it_has_earned_it():
    budget = LoopBudget(share=0.25, burst_s=1.0)
    assert budget.wait_s(now=5.0) == 0.0
    budget.take(3.0, now=5.0)
    assert budget.wait_s(now=5.0) == pytest.approx(8.0, abs=0.1)
    assert budget.wait_s(now=9.0) == pytest.approx(4.0, abs=0.1)
    assert budget.wait_s(now=5.0 + 8.1) == 0.0
    assert budget.wait_s(now=1.0) == 0.0, "a clock that turns back costs nothing"


def test_in_the_long_run_nobody_takes_more_than_its_share_whatever_a_message_costs():
    for cost_s in (0.0001, 0.004, 2.0):
        budget, now, taken_s = LoopBudget(share=0.5, burst_s=0.25), 0.0, 0.0
        while now < 1000.0:
            now += budget.wait_s(now=now)
            budget.take(cost_s, now=now + cost_s)
            now, taken_s = now + cost_s, taken_s + cost_s
        assert taken_s / now <= 0.5 + (0.25 + cost_s) / 1000.0


async def test_what_the_work_costs_is_counted_and_one_message_is_worked_on_at_a_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(loop_share.time, "thread_time", lambda: clock[0])
    share, order = LoopShare(), []
    share.budget = LoopBudget(share=0.5, burst_s=0.01)

    async def work(name):
        async with share.turn():
            order.append(name)
            clock[0] += 0.02

    await asyncio.wait_for(asyncio.gather(*map(work, "abc")), 60)
    assert order == ["a", "b", "c"]
    now = asyncio.get_running_loop().time()
    assert not share.budget.is_full(now=now)
    assert share.budget.wait_s(now=now) > 0.0


async def test_others_wait_for_one_message_of_a_pool_however_many_streams_it_has():
    greedy, modest, order = LoopShare(), LoopShare(), []

    async def work(share, name):
        async with share.turn():
            order.append(name)

    works = [*(work(greedy, number) for number in range(50)), work(modest, "modest")]
    await asyncio.wait_for(asyncio.gather(*works), 60)
    assert order.index("modest") <= 1


async def test_what_has_arrived_counts_by_its_bytes_too():
    share, now = LoopShare(), asyncio.get_running_loop().time()
    for _ in range(20):
        share.received(2 << 20)
    owed_s = 20 * (2 << 20) * loop_share.RECEIVING_S_PER_BYTE - loop_share.BURST_S
    waited_s = share.budget.wait_s(now=now)
    assert waited_s == pytest.approx(owed_s / loop_share.SHARE_OF_LOOP, rel=0.1)


async def test_work_that_comes_with_no_message_is_counted_too_even_if_it_fails(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(loop_share.time, "thread_time", lambda: clock[0])
    share, now = LoopShare(), asyncio.get_running_loop().time()

    def fail():
        clock[0] += 5.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), share.charged():
        fail()
    owed_s = 5.0 - loop_share.BURST_S
    waited_s = share.budget.wait_s(now=now)
    assert waited_s == pytest.approx(owed_s / loop_share.SHARE_OF_LOOP, rel=0.1)


async def test_a_stream_that_ends_while_it_waits_leaves_the_turn_to_the_next():
    share = LoopShare()
    share.budget.take(1000.0, now=asyncio.get_running_loop().time())

    async def work():
        async with share.turn():
            pass

    waiting = asyncio.create_task(work())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    share.budget = LoopBudget()
    await asyncio.wait_for(work(), 60)


async def test_what_a_stream_took_that_has_ended_is_remembered_until_it_is_earned_again():
    shares = LoopShares()
    now = asyncio.get_running_loop().time()
    shares.of("greedy").budget.take(1000.0, now=now)
    for number in range(10):
        shares.of(f"other-{number}")
    assert shares.of("greedy").budget.wait_s(now=now) > 1.0
    assert len(shares._of_pool) <= 3, "what has nothing to remember is forgotten"


async def test_a_pool_that_owes_time_waits_while_another_is_answered(
    channel, worker_of, hello_of, monkeypatch
):
    of, owing = LoopShares.of, []

    def lend(shares, pool):
        share = of(shares, pool)
        if pool == "greedy" and not owing:
            owing.append(share)
            share.budget.take(1e6, now=asyncio.get_running_loop().time())
        return share

    monkeypatch.setattr(LoopShares, "of", lend)
    greedy, modest = (worker_of(hello_of("w", pool=pool)) for pool in ("greedy", "modest"))
    async with linked(channel, [greedy, modest]) as (first, second):
        await first.send(greedy.heartbeat(sequence=1))
        waiting = asyncio.create_task(first.receive_until(HeartbeatAck))
        for sequence in range(2, 20):
            await second.send(modest.heartbeat(sequence=sequence))
            assert (await second.receive_until(HeartbeatAck)).sequence == sequence
        assert owing
        assert not waiting.done(), "nothing is lost, but it waits"
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await waiting


async def test_what_a_worker_is_sent_is_encoded_at_its_pools_expense(
    channel, worker_of, hello_of, monkeypatch
):
    pools, encoded = [], []
    charged, encode = LoopShare.charged, Encoder.encode
    of, names = LoopShares.of, {}

    def named(shares, pool):
        share = of(shares, pool)
        names[id(share)] = pool
        return share

    @contextmanager
    def noting(share):
        pools.append(names[id(share)])
        with charged(share):
            yield
        pools.pop()

    def noted(encoder, message):
        encoded.append((type(message), *pools))
        return encode(encoder, message)

    monkeypatch.setattr(LoopShares, "of", named)
    monkeypatch.setattr(LoopShare, "charged", noting)
    monkeypatch.setattr(Encoder, "encode", noted)
    worker = worker_of(hello_of("w", pool="paying"))
    async with linked(channel, [worker]) as (link,):
        await link.send(worker.heartbeat(sequence=1))
        await link.receive_until(HeartbeatAck)
    assert (HeartbeatAck, "paying") in encoded

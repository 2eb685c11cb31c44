"""Holds end and pulls give way: no block is lost, and no request waits for ever. Pure."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.wire.block_keys import keys_of
from equipoise.worker.blocks import BlockPool, found_blocks
from equipoise.worker.errors import QueueFullError
from equipoise.worker.latents.holds import HoldEnd, HoldLedger
from equipoise.worker.latents.pulls import Pulls
from equipoise.worker.sequence import Request
from tests.worker.test_scheduler import BLOCK, Model, commit, requests, scheduler_of, solo


def taken(pool, count):
    return [pool.take() for _ in range(count)]


def test_a_hold_ends_once_and_every_hold_is_accounted_for():
    pool = BlockPool(num_blocks=8, block_tokens=BLOCK)
    holds = HoldLedger(pool, hold_s=30.0)
    fetched, released, expired, open_ = (
        holds.take(taken(pool, 2), now=float(now)) for now in range(4)
    )
    assert holds.num_tokens == 8 * BLOCK
    assert holds.end(fetched, HoldEnd.FETCHED)
    assert not holds.end(fetched, HoldEnd.FETCHED)
    assert holds.end(released, HoldEnd.RELEASED)
    holds.expire(32.0)
    assert not holds.end(expired, HoldEnd.RELEASED)
    assert holds.ended == dict.fromkeys(HoldEnd, 1)
    assert (holds.num_taken, holds.num_open, pool.num_used) == (4, 1, 2)
    assert holds.end(open_, HoldEnd.FETCHED)
    assert pool.num_used == 0


def test_each_hold_of_the_same_prompt_keeps_its_blocks_findable():
    scheduler, model = scheduler_of(num_blocks=12, max_step_tokens=40), Model()
    prompt = tuple(range(4 * BLOCK + 1))
    for key in range(2):
        scheduler.submit(Request(key=key, prompt=prompt, max_tokens=1, hold_latents=True))
    first, second = commit(scheduler, plan := scheduler.plan(), model.run(plan))
    assert (scheduler.holds.num_open, scheduler.blocks.num_used) == (2, 4)
    assert scheduler.holds.end(first.hold, HoldEnd.FETCHED)
    scheduler.submit(Request(key=2, prompt=tuple(range(20, 20 + 7 * BLOCK)), max_tokens=1))
    commit(scheduler, plan := scheduler.plan(), model.run(plan))
    keys = keys_of(prompt, block_tokens=scheduler.blocks.block_tokens)
    assert len(found_blocks(scheduler.blocks, keys)) == 4
    assert scheduler.holds.end(second.hold, HoldEnd.FETCHED)
    assert scheduler.blocks.num_used == 0


def test_pulls_give_way_youngest_first_and_keep_what_was_filled():
    pool = BlockPool(num_blocks=8, block_tokens=BLOCK)
    pulls = Pulls(pool)
    old, young = pulls.begin(1, range(17)), pulls.begin(2, range(50, 67))
    assert [len(pull.blocks) for pull in (old, young)] == [4, 4]
    assert not pulls.give_way({3})
    assert pulls.give_way({1, 2})
    assert pulls.next_block(2, young) is None
    assert pulls.next_block(1, old) == old.blocks[0]
    pulls.publish(old)
    pulls.stop(1)
    assert pool.num_used == 1
    assert pulls.give_way({1, 2})
    assert not pulls.give_way({1, 2})
    assert (pool.num_used, pool.num_findable) == (0, 1)


def handed_over(key, *, num_tokens=3 * BLOCK + 1):
    first = 100 * key
    prompt = tuple(range(first, first + num_tokens))
    return Request(key=key, prompt=prompt, max_tokens=2, is_handed_over=True)


def test_a_request_in_line_leaves_blocks_to_those_ahead_of_it():
    scheduler = scheduler_of(num_blocks=10)
    for key in range(3):
        scheduler.submit(handed_over(key))
    assert scheduler.begin_pull(2) is None
    assert scheduler.begin_pull(1) is not None
    assert scheduler.begin_pull(2) is None
    assert scheduler.begin_pull(0) is not None
    assert scheduler.cancel(1)
    assert scheduler.begin_pull(2) is not None
    assert scheduler.begin_pull(9) is None


def test_a_request_whose_latents_are_under_way_is_counted_and_holds_up_nobody():
    scheduler = scheduler_of(max_queued=0)
    scheduler.submit(handed_over(0))
    scheduler.submit(Request(key=1, prompt=(1, 2), max_tokens=2))
    with pytest.raises(QueueFullError):
        scheduler.submit(Request(key=2, prompt=(1, 2), max_tokens=2))
    assert [chunk.key for chunk in scheduler.plan().chunks] == [1]
    assert (scheduler.num_queued, scheduler.is_waiting(0)) == (1, True)
    scheduler.end_pull(0)
    assert [chunk.key for chunk in scheduler.plan().chunks] == [1, 0]


def test_a_full_cache_lets_requests_wait_for_room_instead_of_prefilling_them():
    """Six requests of which the cache has room for two: each is fetched whole."""
    scheduler, model = scheduler_of(num_blocks=10, max_step_tokens=8), Model()
    to_fetch = [handed_over(key) for key in range(6)]
    for one in to_fetch:
        scheduler.submit(one)
    num_left = len(to_fetch)
    while num_left:
        while to_fetch and (pull := scheduler.begin_pull(to_fetch[0].key)) is not None:
            one = to_fetch.pop(0)
            while scheduler.pulls.next_block(one.key, pull) is not None:
                fill(scheduler, model, one, pull)
            scheduler.end_pull(one.key)
        plan = scheduler.plan()
        assert plan.chunks, "a request runs"
        emissions = commit(scheduler, plan, model.run(plan))
        num_left -= sum(emission.is_last for emission in emissions)
    assert scheduler.counts.prefilled_missing == scheduler.counts.preempted == 0
    assert scheduler.blocks.num_used == 0


def fill(scheduler, model, one, pull):
    """The next block of a prompt arrives."""
    block, first = scheduler.pulls.next_block(one.key, pull), pull.num_ready * BLOCK
    for place in range(BLOCK):
        model.cache[block, place] = one.prompt[first + place]
    scheduler.pulls.publish(pull)


def has_ended(scheduler, model, one, pull, *, data):
    """The next block of a prompt arrives, or not; returns whether it was the last to arrive."""
    if scheduler.pulls.next_block(one.key, pull) is not None and data.draw(st.integers(0, 3)):
        fill(scheduler, model, one, pull)
        return False
    return data.draw(st.booleans())


@settings(deadline=None)
@given(requests(), st.integers(1, 4), st.integers(11, 40), st.data())
def test_requests_with_holds_and_pulls_get_their_solo_tokens_and_nothing_stays(
    offered, most, num_blocks, data
):
    scheduler = scheduler_of(num_blocks=num_blocks, max_requests=most, hold_s=5.0)
    model, now = Model(), 0.0
    offered = [replace(one, hold_latents=data.draw(st.booleans())) for one in offered]
    got, finished, holds = {one.key: [] for one in offered}, set(), []
    waiting, pulling = list(offered), {}
    while len(finished) < len(offered):
        now += 1.0
        assert now < 2000, "no request waits for ever"
        if waiting and (data.draw(st.booleans()) or not pulling):
            one = waiting.pop(0)
            if data.draw(st.booleans()):
                one = replace(one, is_handed_over=True)
                pulling[one.key] = (one, None)
            scheduler.submit(one)
        for one, pull in list(pulling.values()):
            pulling[one.key] = (one, pull or scheduler.begin_pull(one.key))
            if pull is not None and has_ended(scheduler, model, one, pull, data=data):
                del pulling[one.key]
                scheduler.end_pull(one.key)
        if holds and data.draw(st.booleans()):
            scheduler.holds.end(holds.pop(), HoldEnd.FETCHED)
        plan = scheduler.plan(now=now)
        sampled, drafts, scores = model.run(plan)
        for emission in scheduler.commit(plan, sampled, drafts, scores=scores, now=now):
            got[emission.key].append(emission.token)
            if emission.is_last:
                finished.add(emission.key)
                holds += [emission.hold] * bool(emission.hold)
    assert all(got[one.key] == solo(one) for one in offered)
    scheduler.holds.expire(now + 5.0)
    ledger = scheduler.holds
    assert (scheduler.blocks.num_used, ledger.num_open) == (0, 0)
    assert ledger.num_taken == ledger.ended.total()

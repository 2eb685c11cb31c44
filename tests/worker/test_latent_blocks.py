"""Holds end and pulls give way: no block is lost, and no request waits for ever. Pure."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.worker.blocks import BlockPool, found_blocks
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
    assert len(found_blocks(scheduler.blocks, prompt)) == 4
    assert scheduler.holds.end(second.hold, HoldEnd.FETCHED)
    assert scheduler.blocks.num_used == 0


def test_a_pull_takes_only_the_room_it_is_given_and_gives_way_youngest_first():
    pool = BlockPool(num_blocks=8, block_tokens=BLOCK)
    pulls = Pulls(pool)
    old = pulls.begin(1, range(17), room=3)
    young = pulls.begin(2, range(50, 67), room=9)
    assert [len(pull.keys) for pull in (old, young)] == [4, 4]
    assert [len(pull.blocks) for pull in (old, young)] == [3, 4]
    assert pulls.give_way()
    assert pulls.next_block(2, young) is None
    assert pulls.next_block(1, old) == old.blocks[0]
    pulls.publish(old)
    pulls.stop(1)
    assert pool.num_used == 1
    assert pulls.give_way()
    assert not pulls.give_way()
    assert (pool.num_used, pool.num_findable) == (0, 1)


def fill_next(scheduler, model, one, pull, *, data):
    """The next block of a prompt arrives, if it does; returns whether it did."""
    block = scheduler.pulls.next_block(one.key, pull)
    if block is None or not data.draw(st.integers(0, 3)):
        return False
    first = pull.num_ready * BLOCK
    for place in range(BLOCK):
        model.cache[block, place] = one.prompt[first + place]
    scheduler.pulls.publish(pull)
    return True


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
                pulling[one.key] = (one, scheduler.begin_pull(one.key, one.prompt))
            else:
                scheduler.submit(one)
        for one, pull in list(pulling.values()):
            if not fill_next(scheduler, model, one, pull, data=data) and data.draw(st.booleans()):
                del pulling[one.key]
                scheduler.pulls.stop(one.key)
                scheduler.submit(one)
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

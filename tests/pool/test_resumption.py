"""A new balancer meets workers that run: the majority decides what, whoever speaks first."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from equipoise.planning.layout import Layout
from equipoise.pool.effects import WriteAdopted, WriteMembership
from equipoise.pool.health import Health
from equipoise.pool.records import EpochMembers, PoolMemory
from equipoise.wire.balancer_messages import JoinEpoch
from tests.support.deaths import lost, serve_all, with_spare_slots

REFORM_S = 5


@pytest.fixture
def before(make_harness):
    """A balancer that ends, with a pool of four that serves on."""
    harness = with_spare_slots(make_harness())
    harness.serve()
    return harness


@pytest.fixture
def succeed(before, make_harness):
    """The next balancer, which no worker has found yet."""

    def successor(memory):
        harness = make_harness(memory=memory)
        harness.workers, harness.now = before.workers, before.now + 5.0
        return harness

    return successor


@pytest.fixture
def recorded(before):
    return PoolMemory(
        committed=before.pool.layouts.current,
        next_generation=before.pool.layouts.next_generation,
        members=before.pool.roster.epoch_members(),
    )


@pytest.fixture(params=["recorded", "forgotten"])
def successor(request, succeed, recorded):
    return succeed(recorded if request.param == "recorded" else PoolMemory())


def of_three(layout):
    """Another layout, of three ranks."""
    num_slots = 3 * layout.slots_per_rank
    row = np.arange(num_slots) % layout.num_experts
    return Layout(
        generation=1,
        num_experts=layout.num_experts,
        num_ranks=3,
        expert_of_slot=np.tile(row, (layout.num_layers, 1)),
    )


def mirrored(layout):
    return layout.with_placement(layout.expert_of_slot[:, ::-1].copy(), generation=1)


LIES = {
    "a later epoch": lambda worker: {"epoch": 77},
    "a later epoch of fewer ranks": lambda worker: {
        "epoch": 77,
        "rank": 0,
        "workers": (worker.hello.worker, "worker-7", "worker-8"),
        "layout": of_three(worker.layout),
    },
    "fewer ranks": lambda worker: {
        "rank": 2,
        "workers": ("worker-0", "worker-2", worker.hello.worker),
        "layout": of_three(worker.layout),
    },
    "another layout": lambda worker: {"layout": mirrored(worker.layout)},
    "the rank of another": lambda worker: {
        "rank": 1,
        "workers": ("worker-0", worker.hello.worker, "worker-1", "worker-2"),
    },
}


def claim(worker, **changes):
    hello = worker.reconnecting()
    return replace(hello, running=replace(hello.running, **changes))


def beat(harness, *, seconds):
    for _ in range(seconds):
        harness.now += 1.0
        for worker in harness.workers.values():
            if worker.hello.worker in harness.pool.roster.members:
                harness.say(worker, worker.heartbeat())
        harness.tick()


def seated(harness):
    return [member.name for member in harness.pool.roster.seated()]


def names(workers):
    return [worker.hello.worker for worker in workers]


def reform(harness):
    return next(one for one in harness.pool.counters.timeouts.all() if one.name == "reform")


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_a_group_that_agrees_is_resumed_with_its_last_hello(successor, order):
    for number in order:
        assert not successor.sent_to("worker-0", JoinEpoch)
        successor.hello(successor.ranks[number].reconnecting())
    assert (successor.pool.roster.epoch, seated(successor)) == (1, names(successor.ranks))
    assert successor.pool.diagnosis().health is Health.SERVING
    assert all(len(successor.sent_to(name, JoinEpoch)) == 1 for name in successor.workers)
    assert reform(successor).reached == 0


def test_a_resumed_epoch_is_not_recorded_over_a_later_one_that_its_ranks_never_took_up(
    succeed, recorded
):
    later = EpochMembers(epoch=2, workers=(*recorded.members.workers, "worker-4"))
    successor = succeed(replace(recorded, members=later))
    for worker in successor.ranks:
        successor.hello(worker.reconnecting())
    assert (successor.pool.roster.epoch, seated(successor)) == (1, names(successor.ranks))
    assert not successor.pool.agreement.must_reconcile
    assert not [one for one in successor.writes if isinstance(one, WriteMembership)]
    assert successor.pool.roster.highest_epoch == 2


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("lie", LIES)
def test_a_lone_liar_decides_nothing_whenever_it_speaks(successor, place, lie):
    *honest, liar = successor.ranks
    hellos = [worker.reconnecting() for worker in honest]
    hellos.insert(place, claim(liar, **LIES[lie](liar)))
    for hello in hellos:
        successor.hello(hello)
    pool, ran = successor.pool, honest[0].layout
    assert (pool.roster.epoch, pool.roster.num_ranks) == (1, 4)
    assert seated(successor) == names(honest)
    assert pool.layouts.get(1).same_placement(ran)
    assert not [one for one in successor.writes if isinstance(one, WriteMembership | WriteAdopted)]
    assert pool.diagnosis().health is Health.DEGRADED
    assert f"{liar.hello.worker} gets no rank: it runs" in pool.diagnosis().reason
    successor.say(liar, liar.report())  # No fault: it does not count yet.
    successor.hello(liar.reconnecting())
    assert seated(successor) == names(successor.ranks)
    assert pool.diagnosis().health is Health.SERVING
    assert pool.counters.rejections.all() == ()


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_that_had_the_bound_to_itself_is_outvoted_later(successor, lie):
    *honest, liar = successor.ranks
    successor.hello(claim(liar, **LIES[lie](liar)))
    assert successor.pool.roster.epoch == 0
    reason = successor.pool.diagnosis().reason
    assert "(worker-3) report what they run: waiting for" in reason
    assert f"at most {REFORM_S} s" in reason
    beat(successor, seconds=REFORM_S + 1)
    assert reform(successor).reached == 1
    assert "did not connect within 5 s" in reform(successor).latest
    for worker in honest:
        successor.hello(worker.reconnecting())
    pool = successor.pool
    assert (pool.roster.epoch, pool.roster.num_ranks) == (1, 4)
    assert seated(successor) == names(honest)
    assert pool.layouts.get(1).same_placement(honest[0].layout)
    successor.hello(liar.reconnecting())
    assert pool.diagnosis().health is Health.SERVING
    sent = [join for name in names(honest) for join in successor.sent_to(name, JoinEpoch)]
    assert {join.epoch for join in sent} == {1}


def test_a_majority_is_resumed_at_once_although_one_rank_is_missing(succeed, recorded):
    harness = succeed(recorded)
    *three, last = harness.ranks
    for worker in three[:2]:
        harness.hello(worker.reconnecting())
        assert harness.pool.roster.epoch == 0
    harness.hello(three[2].reconnecting())
    assert seated(harness) == names(three)
    harness.hello(last.reconnecting())
    assert harness.pool.diagnosis().health is Health.SERVING


def test_ranks_are_resumed_at_the_bound_however_often_one_reconnects(successor):
    first, second, *_ = successor.ranks
    waited_s = 0
    successor.hello(second.reconnecting())
    while not successor.pool.roster.epoch:
        waited_s += 1
        assert waited_s <= REFORM_S
        successor.hello(first.reconnecting())
        beat(successor, seconds=1)
    assert (successor.pool.roster.epoch, seated(successor)) == (1, names([first, second]))


def test_one_against_one_the_record_decides(make_harness):
    before = make_harness(num_ranks=2)
    for worker in before.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=16)
    before.serve()
    memory = PoolMemory(
        committed=before.pool.layouts.current,
        next_generation=2,
        members=before.pool.roster.epoch_members(),
    )
    after = make_harness(memory=memory)
    after.workers = before.workers
    honest, liar = after.ranks
    after.hello(claim(liar, epoch=2))
    after.hello(honest.reconnecting())
    assert (after.pool.roster.epoch, seated(after)) == (1, ["worker-0"])
    assert "worker-1 gets no rank: it runs in epoch 2, but 1 of 2 ranks of epoch 1" in (
        after.pool.diagnosis().reason
    )


def test_a_worker_left_over_from_the_epoch_on_record_does_not_decide(succeed, recorded):
    """The store is older than the ranks: three of them went on without the fourth."""
    harness = succeed(recorded)
    *ranks, left_over = harness.ranks
    layout = of_three(ranks[0].layout)
    layout = layout.with_placement(layout.expert_of_slot, generation=9)
    harness.hello(left_over.reconnecting())
    for rank, worker in enumerate(ranks):
        workers = tuple(names(ranks))
        harness.hello(claim(worker, epoch=2, rank=rank, workers=workers, layout=layout))
    assert (harness.pool.roster.epoch, seated(harness)) == (2, names(ranks))
    assert harness.pool.layouts.committed.generation == 9
    assert "worker-3 gets no rank: it runs in epoch 1, but 3 of 3 ranks of epoch 2" in (
        harness.pool.diagnosis().reason
    )
    harness.say(left_over, lost(left_over))
    harness.tick(seconds=0.6)
    (epoch,) = {worker.epoch for worker in harness.ranks}
    assert epoch > 2
    serve_all(harness)
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_claim_does_not_hold_up_workers_whose_group_has_ended(successor):
    liar, *survivors = successor.ranks
    successor.hello(claim(liar, epoch=77))
    for worker in survivors:
        successor.hello(replace(worker.hello, group_lost=lost(worker)))
    beat(successor, seconds=REFORM_S + 1)
    (epoch,) = {worker.epoch for worker in successor.ranks}
    assert epoch > 77, "with the liar as a rank like any"
    serve_all(successor)
    assert successor.pool.diagnosis().health is Health.SERVING


def test_a_rank_that_had_not_taken_up_its_epoch_is_sent_it_again(make_harness):
    harness = make_harness()
    harness.serve()
    slow, *others = harness.ranks
    harness.disconnected.add(slow.hello.worker)
    for worker in others:
        harness.say(worker, lost(worker))
    beat(harness, seconds=REFORM_S)
    assert {worker.epoch for worker in others} == {2}
    assert slow.epoch == 1
    harness.disconnected.clear()
    harness.hello(slow.reconnecting())
    assert {worker.epoch for worker in harness.ranks} == {2}
    serve_all(harness)
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.counters.rejections.all() == ()


def test_an_epoch_that_a_balancer_without_memory_opened_too_early_gives_way(
    succeed, worker_of, hello_of
):
    harness = succeed(PoolMemory())
    ranks = harness.ranks
    early = worker_of(hello_of("worker-9", num_ranks=1, slots_per_rank=32))
    harness.workers = {**harness.workers, "worker-9": early}
    harness.hello(early.hello)
    harness.say(early, early.serving())
    assert harness.pool.diagnosis().health is Health.SERVING
    for worker in ranks:
        harness.hello(claim(worker, epoch=5))
    assert (harness.pool.roster.epoch, seated(harness)) == (5, names(ranks))
    assert harness.pool.roster.complete
    assert harness.pool.layouts.current.same_placement(ranks[0].layout)
    assert "worker-9 is quarantined" in harness.pool.diagnosis().reason


def test_a_cut_of_all_streams_lets_no_stranger_decide(before, worker_of, hello_of):
    harness = before
    ranks = harness.ranks
    for worker in ranks:
        harness.lose(worker)
    stranger = hello_of("worker-9", slots_per_rank=12)
    harness.workers["worker-9"] = worker_of(stranger)
    workers = ("worker-9", *names(ranks[1:]))
    claims = replace(ranks[0].reconnecting().running, epoch=77, workers=workers)
    harness.hello(replace(stranger, running=claims))
    harness.tick(seconds=1.0)
    assert harness.pool.roster.epoch == 1
    for worker in ranks:
        harness.hello(worker.reconnecting())
    assert (harness.pool.roster.epoch, seated(harness)) == (1, names(ranks))
    assert harness.pool.roster.complete

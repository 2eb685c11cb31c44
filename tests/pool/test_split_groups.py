"""Two groups of one pool step apart from each other: the pool becomes one group again."""

import random
from dataclasses import replace

import pytest

from equipoise.pool.effects import WriteAdopted, WriteMembership
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.records import PoolMemory
from tests.support.deaths import trouble
from tests.support.joining_workers import Fleet, memory_of

OLD, NEW = ("worker-0", "worker-2"), ("worker-1", "worker-3")


@pytest.fixture
def fleet(make_harness):
    """Four workers, of which two hold all experts, that serve in epoch 1."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    fleet.live(seconds=5)
    check(fleet)
    return fleet


def check(fleet):
    """All workers are ranks of one epoch and serve, and no number was used twice."""
    pool = fleet.harness.pool
    assert trouble(pool) == ""
    assert {worker.epoch for worker in fleet.alive} == {pool.roster.epoch}
    assert all(worker.serves for worker in fleet.alive)
    assert {one.name for one in pool.roster.seated()} == set(fleet.workers)
    assert {one.layout.generation for one in fleet.alive} == {pool.layouts.stored_generation}
    writes = fleet.harness.writes
    adopted = [one.layout.generation for one in writes if isinstance(one, WriteAdopted)]
    opened = [one.members.epoch for one in writes if isinstance(one, WriteMembership)]
    assert adopted == sorted(set(adopted))
    assert opened == sorted(set(opened))


def half_serves(fleet):
    """The others lost their streams and the group: half of the workers serve in epoch 2."""
    for name in NEW:
        fleet.cut(name)
    for name in OLD:
        fleet.workers[name].fail("a peer hangs")
    fleet.live(seconds=2)
    assert fleet.opened()[-1] == 2
    assert all(fleet.workers[name].serves for name in OLD)


def split(fleet):
    """Both streams of epoch 2 break, and the other workers form a group of their own."""
    half_serves(fleet)
    for name in OLD:
        fleet.cut(name)
    fleet.connect(*NEW)
    fleet.live(seconds=2)
    assert [one.epoch for one in fleet.workers.values()] == [2, 3, 2, 3]
    assert all(worker.serves for worker in fleet.alive), "both groups"


@pytest.mark.parametrize("order", [OLD, OLD[::-1]])
@pytest.mark.parametrize("apart_s", [0, 0.5, 20])
def test_a_group_that_returns_after_an_epoch_opened_without_it_is_part_of_the_next(
    fleet, order, apart_s
):
    split(fleet)
    fleet.connect(order[0])
    fleet.live(seconds=apart_s)
    fleet.connect(order[1])
    fleet.live(seconds=10)
    check(fleet)
    assert fleet.harness.pool.counters.rejections.all() == ()


def test_it_returns_while_the_epoch_without_it_is_still_joined(fleet):
    half_serves(fleet)
    for name in OLD:
        fleet.cut(name)
    fleet.connect(*NEW)
    fleet.connect(*OLD)
    assert "worker-0, worker-2 joins" in fleet.harness.pool.diagnosis().reason
    fleet.live(seconds=10)
    check(fleet)
    assert fleet.opened() == [1, 2, 3, 4]


def test_it_is_part_of_the_next_epoch_if_its_streams_were_only_silent(fleet):
    half_serves(fleet)
    fleet.silent.update(OLD)
    fleet.live(seconds=6)
    fleet.connect(*NEW)
    fleet.live(seconds=10)
    assert [one.epoch for one in fleet.workers.values()] == [2, 3, 2, 3]
    fleet.silent.clear()
    fleet.live(seconds=10)
    check(fleet)


@pytest.mark.parametrize("first", NEW)
def test_it_is_part_of_the_next_epoch_if_it_returns_before_the_ranks_do(fleet, first):
    split(fleet)
    for name in NEW:
        fleet.cut(name)
    fleet.connect(OLD[0])
    fleet.connect(first)
    fleet.live(seconds=1)
    fleet.connect(OLD[1])
    fleet.connect(*(name for name in NEW if name != first))
    fleet.live(seconds=20)
    check(fleet)


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("first", [OLD, NEW])
def test_a_new_balancer_that_meets_both_groups_makes_one_of_them(fleet, first, remembers):
    split(fleet)
    fleet.succeed(memory_of(fleet.harness.writes) if remembers else PoolMemory())
    fleet.connect(*first)
    fleet.connect(*NEW if first == OLD else OLD)
    fleet.live(seconds=20)
    check(fleet)
    assert fleet.opened()[-1] > 3


def test_if_the_ranks_die_the_other_group_goes_on(fleet):
    split(fleet)
    fleet.connect(*OLD)
    for name in NEW:
        fleet.kill(name)
    fleet.live(seconds=10)
    assert trouble(fleet.harness.pool) == ""
    assert all(worker.serves for worker in fleet.alive)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_breaks_whenever_all_workers_end_up_as_one_group(make_harness, seed):
    draw = random.Random(seed)
    fleet = Fleet(make_harness, slots_per_rank=16)
    for _ in range(30):
        name = draw.choice(sorted(fleet.workers))
        match draw.choice(["cut", "cut", "connect", "connect", "silence", "fail", "succeed"]):
            case "cut":
                fleet.cut(name)
            case "connect":
                fleet.cut(name)
                fleet.connect(name)
            case "silence":
                fleet.silent ^= {name}
            case "fail" if fleet.workers[name].serves:
                fleet.workers[name].fail("a peer hangs")
            case "succeed" if draw.random() < 0.3:
                fleet.succeed(memory_of(fleet.harness.writes))
        fleet.live(seconds=draw.choice([0, 0.5, 1, 3, 8]), forms=draw.random() < 0.8)
    fleet.silent.clear()
    for name in sorted(fleet.harness.disconnected):
        fleet.connect(name)
    fleet.live(seconds=100)
    check(fleet)


def test_a_worker_whose_peers_have_a_later_epoch_waits_until_its_group_has_ended(fleet):
    """If it still reports to run in the earlier one, it hangs: the others would wait for it."""
    stray = fleet.workers["worker-3"]
    fleet.cut("worker-3")
    ran = stray.greeting()
    for name in ("worker-0", "worker-1", "worker-2"):
        fleet.workers[name].fail("a peer hangs")
    fleet.live(seconds=2)
    assert fleet.opened()[-1] == 2
    with pytest.raises(RejectedWorkerError, match="it can join once its group has ended"):
        fleet.harness.hello(replace(ran, highest_epoch=1))
    fleet.connect("worker-3")
    fleet.live(seconds=5)
    check(fleet)

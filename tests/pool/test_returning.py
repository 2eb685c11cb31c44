"""Workers that join a pool: new ones, restarted ones, and the same ones at a new balancer."""

from dataclasses import replace

import pytest

from equipoise.planning.moves import RankSource
from equipoise.pool.effects import WriteMembership
from equipoise.pool.health import Health
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.records import PoolMemory
from equipoise.wire.messages import Leaving
from tests.support.deaths import (
    check,
    come,
    die,
    lost,
    names,
    notice,
    serve_all,
    trouble,
    with_spare_slots,
)


@pytest.fixture
def serving_harness(make_harness):
    harness = with_spare_slots(make_harness())
    harness.serve()
    return harness


def test_a_pool_without_slots_for_all_experts_is_down_and_comes_back_by_itself(
    serving_harness, worker_of, hello_of
):
    harness = serving_harness
    die(harness, *harness.ranks[:2])
    notice(harness, *harness.ranks)
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DOWN
    assert "with 24 slots cannot hold 32 experts: 3 workers are needed" in diagnosis.reason
    come(harness, worker_of, hello_of("worker-9", node="node-1", slots_per_rank=12))
    assert {worker.epoch for worker in harness.ranks} == {2}
    serve_all(harness)
    check(harness)
    assert trouble(harness.pool) == ""


def test_a_balancer_without_memory_uses_no_number_again_that_a_rank_without_group_knows(
    serving_harness, make_harness
):
    before = serving_harness
    after = make_harness()
    after.workers = before.workers
    for worker in before.ranks:
        group_lost = replace(lost(worker), epoch=5, generation=6 + worker.rank // 2)
        after.hello(replace(worker.hello, group_lost=group_lost))
        opened = after.pool.layouts.current
        assert opened is None or opened.generation > 8, "before all have reported"
    assert opened is not None
    assert after.pool.roster.epoch > 5
    leap = replace(lost(before.ranks[0]), generation=2**60)
    with pytest.raises(RejectedWorkerError, match="reports generation"):
        after.hello(replace(before.ranks[0].hello, group_lost=leap))


def test_a_newcomer_makes_the_pool_larger_and_pulls_its_experts_from_ranks(
    serving_harness, worker_of, hello_of
):
    harness = serving_harness
    come(harness, worker_of, hello_of("worker-4", node="node-0", slots_per_rank=12))
    assert harness.workers["worker-4"].join_epoch is None
    harness.tick(seconds=0.6)
    newcomer = harness.workers["worker-4"]
    assert len(newcomer.join_epoch.moves) == 3 * 12
    assert all(isinstance(move.sources[0], RankSource) for move in newcomer.join_epoch.moves)
    serve_all(harness)
    check(harness)
    assert harness.pool.layouts.current.num_ranks == 5


def test_a_dead_worker_that_returns_is_a_rank_again(serving_harness, worker_of):
    harness = serving_harness
    dead = harness.ranks[1]
    die(harness, dead)
    notice(harness, *harness.ranks)
    serve_all(harness)
    come(harness, worker_of, replace(dead.hello, boot_id="boot-2"))
    harness.tick(seconds=0.6)
    serve_all(harness)
    check(harness)
    assert harness.pool.roster.epoch == 3
    assert dead.hello.worker in names(harness)


def test_a_worker_that_restarts_before_anybody_noticed_returns_to_its_rank_and_layout(
    serving_harness, worker_of
):
    harness = serving_harness
    before, dead = harness.pool.layouts.current, harness.ranks[1]
    die(harness, dead)
    come(harness, worker_of, replace(dead.hello, boot_id="boot-2"))
    notice(harness, *[worker for worker in harness.workers.values() if worker.join_epoch])
    serve_all(harness)
    check(harness)
    assert harness.pool.roster.epoch == 2
    assert harness.pool.layouts.current is before
    assert harness.ranks[1].hello.boot_id == "boot-2"


def test_a_worker_that_comes_back_with_other_labels_is_planned_for_where_it_is_now(harness):
    harness.serve()
    assert "node-9" not in harness.pool.roster.topology().node_of_rank
    moved = harness.ranks[3]
    harness.lose(moved)
    harness.hello(moved.reconnecting(node="node-9"))
    assert harness.pool.roster.complete
    assert harness.pool.roster.topology().node_of_rank[3] == "node-9"


def test_survivors_that_meet_a_new_balancer_are_its_pool(serving_harness, make_harness):
    old = serving_harness
    memory = PoolMemory(
        committed=old.pool.layouts.current,
        next_generation=old.pool.layouts.next_generation,
        members=next(write.members for write in old.writes if isinstance(write, WriteMembership)),
    )
    new = with_spare_slots(make_harness(memory=memory))
    new.workers = dict(old.workers)
    dead, *survivors = old.ranks
    del new.workers[dead.hello.worker]
    for worker in survivors:
        new.hello(replace(worker.hello, group_lost=lost(worker)))
    assert {worker.epoch for worker in survivors} == {1}
    for _ in range(5):
        new.now += 1.0
        for worker in survivors:
            new.say(worker, worker.heartbeat())
        new.tick()
    (epoch,) = {worker.epoch for worker in survivors}
    assert epoch > 1
    serve_all(new)
    check(new)


def test_a_survivor_that_keeps_reconnecting_is_waited_for_once(serving_harness):
    harness = serving_harness
    survivor = harness.ranks[3]
    notice(harness, survivor)
    waited_s = 0
    while harness.pool.roster.epoch == 1 and waited_s < 60:
        for worker in harness.ranks[:3]:
            harness.say(worker, worker.heartbeat())
        harness.tick(seconds=1.0)
        waited_s += 1
        if waited_s % 3 == 0:
            harness.hello(replace(survivor.hello, group_lost=lost(survivor)))
    assert waited_s <= harness.pool.policy.values.reform_timeout_s + 1


def test_a_pool_that_has_lost_all_its_ranks_is_down_until_they_come_back(serving_harness):
    harness = serving_harness
    for worker in harness.ranks:
        harness.lose(worker)
    harness.tick(600.0)
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DOWN
    assert "no worker is connected: rank 0 (worker-0) is gone: its stream ended" in diagnosis.reason
    assert harness.pool.roster.intended_ranks == 4
    for worker in harness.ranks:
        harness.hello(worker.reconnecting())
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_pool_whose_workers_have_all_failed_is_down_although_they_say_so(serving_harness):
    harness = serving_harness
    for worker in harness.ranks:
        harness.say(worker, Leaving(reason="step 7 failed", failed=True))
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DOWN
    assert "rank 0 (worker-0) is gone: it left: step 7 failed" in diagnosis.reason
    assert harness.pool.roster.intended_ranks == 4


def test_a_pool_whose_workers_have_all_stopped_in_order_is_not_down(serving_harness):
    harness = serving_harness
    for worker in harness.ranks:
        harness.say(worker, Leaving(reason="SIGTERM"))
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.WAITING
    assert "no worker is connected: rank 0 (worker-0) is gone: it left: SIGTERM" in diagnosis.reason
    assert harness.pool.roster.intended_ranks == 0

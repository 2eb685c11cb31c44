"""A pool whose ranks die, hang, return and come anew, at every moment that matters."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.pool.effects import WriteAdopted, WriteMembership
from equipoise.balancer.pool.health import Health
from equipoise.balancer.pool.memory import PoolMemory
from equipoise.planning.moves import CheckpointSource, RankSource
from equipoise.wire.messages import Assignment, GroupLost, Leaving


@pytest.fixture
def open_bench(make_bench):
    """A pool of workers with 12 slots, of which three hold the 32 experts."""

    def build(num_ranks=4, **changes):
        bench = make_bench(num_ranks=num_ranks, **changes)
        for worker in bench.workers.values():
            worker.hello = replace(worker.hello, slots_per_rank=12)
        return bench

    return build


@pytest.fixture
def serving_bench(open_bench):
    bench = open_bench()
    bench.serve()
    return bench


def lost(worker, reason="a peer rank failed or hangs"):
    """What a worker says whose group is over."""
    return GroupLost(
        epoch=worker.epoch, reason=reason, expert_of_slot=worker.own(worker.layout.expert_of_slot)
    )


def die(bench, *victims):
    """Processes end: their streams too, and what they held is gone."""
    for victim in victims:
        bench.lose(victim, reason="its stream was cut")
        bench.disconnected.add(victim.hello.worker)
        del bench.workers[victim.hello.worker]


def notice(bench, *workers):
    for worker in workers:
        bench.say(worker, lost(worker))


def serve_all(bench):
    for worker in bench.ranks:
        bench.say(worker, worker.serving())


def names(bench):
    return [worker.hello.worker for worker in bench.ranks]


def come(bench, worker_of, hello):
    """A new process says hello."""
    bench.workers[hello.worker] = worker_of(hello)
    bench.disconnected.discard(hello.worker)
    bench.hello(hello)


def epochs_written(bench):
    return [write.membership.epoch for write in bench.writes if isinstance(write, WriteMembership)]


def check(bench):
    """What must hold at any time of workers that were told their place."""
    ranks = bench.ranks
    assert [worker.rank for worker in ranks] == list(range(len(ranks)))
    (epoch,) = {worker.epoch for worker in ranks}
    (generation,) = {worker.layout.generation for worker in ranks}
    assert bench.pool.roster.epoch == epoch
    assert bench.pool.layouts.stored_generation == generation
    assert epochs_written(bench) == sorted(set(epochs_written(bench)))
    (table,) = {worker.layout.expert_of_slot.tobytes() for worker in ranks}
    assert table
    nodes = [worker.hello.node for worker in ranks]
    assert nodes == sorted(nodes), "ranks of a node are contiguous"


# A death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", range(4))
def test_the_survivors_of_a_death_serve_on_with_all_experts(serving_bench, victim):
    bench = serving_bench
    before = bench.pool.layouts.current
    die(bench, bench.ranks[victim])
    survivors = bench.ranks
    notice(bench, *survivors)
    assert all(worker.epoch == 2 for worker in survivors)
    serve_all(bench)
    check(bench)
    layout = bench.pool.layouts.current
    assert layout.num_ranks == 3
    assert layout.generation == before.generation + 1
    assert bench.pool.diagnosis().health is Health.SERVING
    (assignment,) = [told for told in bench.sent_to("worker-3", Assignment) if told.epoch == 2] or [
        bench.ranks[0].assignment
    ]
    assert assignment.rendezvous_address == f"{names(bench)[0]}:2"


def test_survivors_keep_their_slots_and_pull_what_is_lost_from_each_other(serving_bench):
    bench = serving_bench
    dead, *survivors = bench.ranks
    held = {worker.hello.worker: worker.own(worker.layout.expert_of_slot) for worker in survivors}
    die(bench, dead)
    notice(bench, *survivors)
    for worker in bench.ranks:
        now = worker.own(worker.layout.expert_of_slot)
        changed = np.argwhere(now != held[worker.hello.worker])
        first = worker.rank * 12
        moves = worker.assignment.moves
        assert {(move.layer, move.slot - first) for move in moves} == set(map(tuple, changed))
        for move in moves:
            assert move.sources[-1] == CheckpointSource()
            for source in move.sources[:-1]:
                holder = bench.ranks[source.rank].hello.worker
                assert move.expert in held[holder][move.layer]


def test_nobody_is_told_before_the_layout_and_the_membership_are_written(serving_bench):
    bench = serving_bench
    bench.store_fault = "the disk is full"
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    bench.tick(seconds=1.0)
    assert all(worker.epoch == 1 for worker in bench.ranks)
    assert "the disk is full" in bench.pool.diagnosis().reason
    bench.store_fault = ""
    bench.sent.clear()
    bench.tick(seconds=1.0)
    adopted, membership = bench.writes[-2:]
    assert isinstance(adopted, WriteAdopted)
    assert isinstance(membership, WriteMembership)
    assert all(worker.epoch == 2 for worker in bench.ranks)
    serve_all(bench)
    check(bench)


def test_a_hung_rank_is_left_out_when_it_is_silent_and_taken_in_when_it_wakes(serving_bench):
    bench = serving_bench
    hung, *others = bench.ranks
    for _ in range(4):
        bench.now += 1.0
        for worker in others:
            bench.say(worker, worker.heartbeat())
        bench.tick()
    notice(bench, *others)
    assert "waiting for worker-0 to let go of it" in bench.pool.diagnosis().reason
    bench.tick(seconds=1.1)
    assert {worker.epoch for worker in others} == {2}
    assert hung.epoch == 1
    for worker in others:
        bench.say(worker, worker.serving())
    assert bench.pool.diagnosis().health is Health.SERVING
    assert next(b for b in bench.pool.bounds.all() if b.name == "report").reached == 1

    for worker in bench.ranks:
        bench.say(worker, worker.heartbeat())
    bench.say(hung, hung.report())  # Counters of the old epoch are no fault.
    notice(bench, hung)
    bench.tick(seconds=0.6)
    assert {worker.epoch for worker in bench.ranks} == {3}
    serve_all(bench)
    check(bench)
    assert bench.pool.refusals.all() == ()


def test_a_group_that_only_some_gave_up_is_reformed_without_the_others_at_the_bound(serving_bench):
    bench = serving_bench
    stubborn, *others = bench.ranks
    notice(bench, *others)
    for _ in range(5):
        bench.now += 1.0
        for worker in bench.ranks:
            bench.say(worker, worker.heartbeat())
        bench.tick()
    assert stubborn.epoch == 1
    assert {worker.epoch for worker in others} == {2}
    reform = next(bound for bound in bench.pool.bounds.all() if bound.name == "reform")
    assert reform.reached == 1
    assert "worker-0 did not let go of it within 5 s" in reform.latest


# Deaths at bad moments ---------------------------------------------------------------------------


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("moment", ["staging", "staged", "some switched"])
def test_a_death_during_a_rollout_ends_it_and_its_number_is_not_used_again(
    serving_bench, skewed, victim, moment
):
    bench = serving_bench
    bench.run_traffic(skewed(1), seconds=10, carry_out=False)
    generation = bench.pool.rollouts.current.target.generation
    if moment != "staging":
        bench.stage_all()
    if moment == "some switched":
        switched = bench.ranks[(victim + 1) % 4]
        bench.say(switched, switched.switch())
    die(bench, bench.ranks[victim])
    notice(bench, *bench.ranks)
    serve_all(bench)
    check(bench)
    assert bench.pool.rollouts.current is None
    assert bench.pool.layouts.current.generation > generation
    assert bench.pool.diagnosis().health is Health.SERVING


@pytest.mark.parametrize("second", range(3))
def test_a_death_while_ranks_form_anew_is_followed_by_another_epoch(open_bench, second):
    bench = open_bench(num_ranks=6)
    bench.serve()
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    die(bench, bench.ranks[second])
    assert {worker.epoch for worker in bench.ranks} == {3}
    assert len(bench.ranks) == 4
    serve_all(bench)
    check(bench)


def test_two_deaths_at_once_are_one_epoch(open_bench):
    bench = open_bench(num_ranks=6)
    bench.serve()
    die(bench, *bench.ranks[:2])
    notice(bench, *bench.ranks)
    assert {worker.epoch for worker in bench.ranks} == {2}
    serve_all(bench)
    check(bench)


def test_ranks_that_did_not_meet_try_again_with_whoever_is_left(serving_bench):
    bench = serving_bench
    die(bench, bench.ranks[3])
    notice(bench, *bench.ranks)
    bench.now += 60.0
    for worker in bench.ranks:
        bench.say(worker, worker.heartbeat())
    notice(bench, *bench.ranks)
    assert {worker.epoch for worker in bench.ranks} == {3}
    assert next(b for b in bench.pool.bounds.all() if b.name == "meet").reached == 1
    serve_all(bench)
    check(bench)


def test_a_word_from_an_epoch_that_is_over_is_no_fault(serving_bench):
    bench = serving_bench
    late = bench.ranks[1]
    words = (late.serving(), late.report(), lost(late))
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    for word in words:
        bench.say(late, word)
    serve_all(bench)
    check(bench)
    assert bench.pool.roster.epoch == 2
    assert bench.pool.refusals.all() == ()


# Too few -----------------------------------------------------------------------------------------


def test_a_pool_without_slots_for_all_experts_is_down_and_comes_back_by_itself(
    serving_bench, worker_of, hello_of
):
    bench = serving_bench
    die(bench, *bench.ranks[:2])
    notice(bench, *bench.ranks)
    diagnosis = bench.pool.diagnosis()
    assert diagnosis.health is Health.DOWN
    assert "with 24 slots cannot hold 32 experts: 3 workers are needed" in diagnosis.reason
    come(bench, worker_of, hello_of("worker-9", node="node-1", slots_per_rank=12))
    assert {worker.epoch for worker in bench.ranks} == {2}
    serve_all(bench)
    check(bench)
    assert bench.pool.diagnosis().health is Health.SERVING


# Growing and returning ---------------------------------------------------------------------------


def test_a_newcomer_makes_the_pool_larger_and_pulls_its_experts_from_ranks(
    serving_bench, worker_of, hello_of
):
    bench = serving_bench
    come(bench, worker_of, hello_of("worker-4", node="node-0", slots_per_rank=12))
    assert bench.workers["worker-4"].assignment is None
    bench.tick(seconds=0.6)
    newcomer = bench.workers["worker-4"]
    assert len(newcomer.assignment.moves) == 3 * 12
    assert all(isinstance(move.sources[0], RankSource) for move in newcomer.assignment.moves)
    serve_all(bench)
    check(bench)
    assert bench.pool.layouts.current.num_ranks == 5


def test_a_dead_worker_that_returns_is_a_rank_again(serving_bench, worker_of):
    bench = serving_bench
    dead = bench.ranks[1]
    die(bench, dead)
    notice(bench, *bench.ranks)
    serve_all(bench)
    come(bench, worker_of, replace(dead.hello, boot_id="boot-2"))
    bench.tick(seconds=0.6)
    serve_all(bench)
    check(bench)
    assert bench.pool.roster.epoch == 3
    assert dead.hello.worker in names(bench)


def test_a_worker_that_restarts_before_anybody_noticed_returns_to_its_rank_and_layout(
    serving_bench, worker_of
):
    bench = serving_bench
    before, dead = bench.pool.layouts.current, bench.ranks[1]
    die(bench, dead)
    come(bench, worker_of, replace(dead.hello, boot_id="boot-2"))
    notice(bench, *[worker for worker in bench.workers.values() if worker.assignment])
    serve_all(bench)
    check(bench)
    assert bench.pool.roster.epoch == 2
    assert bench.pool.layouts.current is before
    assert bench.ranks[1].hello.boot_id == "boot-2"


def test_a_worker_that_leaves_is_not_waited_for(serving_bench):
    bench = serving_bench
    leaver = bench.ranks[2]
    bench.say(leaver, Leaving(reason="SIGTERM"))
    del bench.workers[leaver.hello.worker]
    notice(bench, *bench.ranks)
    bench.lose(leaver)
    serve_all(bench)
    check(bench)
    assert "it left: SIGTERM" in bench.pool.epochs.newest_first()[0].reason


# What survives -----------------------------------------------------------------------------------


def test_averages_survive_a_change_of_ranks_and_planning_goes_on(serving_bench, skewed):
    bench = serving_bench
    bench.run_traffic(skewed(1), seconds=10)
    before = bench.pool.load()
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    np.testing.assert_allclose(bench.pool.load(), before)
    serve_all(bench)
    np.testing.assert_allclose(bench.pool.load(), before)
    bench.run_traffic(skewed(1), seconds=20)
    assert bench.pool.refusals.all() == ()
    assert bench.pool.windows[-1].load_of_rank.shape == (3, 4 - 1)
    check(bench)


def test_a_worker_that_comes_back_with_other_labels_is_planned_for_where_it_is_now(bench):
    bench.serve()
    assert "node-9" not in bench.pool.roster.topology().node_of_rank
    moved = bench.ranks[3]
    bench.lose(moved)
    bench.hello(moved.reconnecting(node="node-9"))
    assert bench.pool.roster.complete
    assert bench.pool.roster.topology().node_of_rank[3] == "node-9"


def test_survivors_that_meet_a_new_balancer_are_its_pool(serving_bench, open_bench):
    old = serving_bench
    memory = PoolMemory(
        committed=old.pool.layouts.current,
        next_generation=old.pool.layouts.next_generation,
        membership=next(
            write.membership for write in old.writes if isinstance(write, WriteMembership)
        ),
    )
    new = open_bench(memory=memory)
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
    assert {worker.epoch for worker in survivors} == {2}
    serve_all(new)
    check(new)


def test_the_pause_of_an_epoch_is_measured(serving_bench):
    bench = serving_bench
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    bench.now += 2.5
    serve_all(bench)
    newest = bench.pool.epochs.newest_first()[0]
    assert newest.epoch == 2
    assert newest.serving_after_s == pytest.approx(2.5)
    assert newest.workers == tuple(names(bench))

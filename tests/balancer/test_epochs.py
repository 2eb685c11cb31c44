"""A pool whose ranks die, hang or leave, at every moment that matters."""

import numpy as np
import pytest

from equipoise.planning.moves import CheckpointSource
from equipoise.pool.effects import WriteAdopted, WriteMembership
from equipoise.pool.health import Health
from equipoise.wire.messages import JoinEpoch, Leaving
from tests.support.deaths import check, die, lost, names, notice, serve_all, with_spare_slots
from tests.support.scripted_worker import MODEL
from tests.support.store_records import A_DECISION


@pytest.fixture
def serving_bench(make_bench):
    bench = with_spare_slots(make_bench())
    bench.serve()
    return bench


@pytest.fixture
def bench_of_six(make_bench):
    bench = with_spare_slots(make_bench(num_ranks=6))
    bench.serve()
    return bench


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
    (join_epoch,) = [told for told in bench.sent_to("worker-3", JoinEpoch) if told.epoch == 2] or [
        bench.ranks[0].join_epoch
    ]
    assert join_epoch.rendezvous_address == f"{names(bench)[0]}:2"


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
        moves = worker.join_epoch.moves
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


def test_an_epoch_behind_a_verdict_that_the_store_did_not_take_is_opened_all_the_same(
    serving_bench,
):
    bench = serving_bench
    stubborn, *others = bench.ranks
    notice(bench, *others)
    live_for(bench, bench.ranks, seconds=4)
    assert stubborn.epoch == others[0].epoch == 1
    bench.pool.journal._late.append(A_DECISION)
    bench.store_fault = "the disk is full"
    live_for(bench, bench.ranks, seconds=1)
    bench.store_fault = ""
    live_for(bench, bench.ranks, seconds=2)
    assert {worker.epoch for worker in others} == {2}
    assert bench.decisions() == [A_DECISION]


def test_who_never_heard_of_an_epoch_is_not_left_out_for_its_sake(bench_of_six):
    bench = bench_of_six
    bench.store_fault = "the disk is full"
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    silent, *others = bench.ranks
    live_for(bench, others, seconds=7)
    bench.store_fault = ""
    live_for(bench, bench.ranks, seconds=1)
    assert (silent.epoch, {worker.epoch for worker in others}) == (1, {3})
    for worker in others:
        bench.say(worker, worker.serving())
    live_for(bench, bench.ranks, seconds=2)
    assert {worker.epoch for worker in bench.ranks} == {4}
    serve_all(bench)
    check(bench)


def live_for(bench, workers, *, seconds):
    """Time in which these workers send heartbeats, and nothing else."""
    for _ in range(seconds):
        bench.now += 1.0
        for worker in workers:
            bench.say(worker, worker.heartbeat())
        bench.tick()


def test_a_hung_rank_is_left_out_when_it_is_silent_and_taken_in_when_it_wakes(serving_bench):
    bench = serving_bench
    hung, *others = bench.ranks
    live_for(bench, others, seconds=4)
    notice(bench, *others)
    assert "waiting for worker-0 to leave it" in bench.pool.diagnosis().reason
    bench.tick(seconds=1.1)
    assert {worker.epoch for worker in others} == {2}
    assert hung.epoch == 1
    for worker in others:
        bench.say(worker, worker.serving())
    assert bench.pool.diagnosis().health is Health.SERVING
    assert next(b for b in bench.pool.counters.bounds.all() if b.name == "report").reached == 1

    for worker in bench.ranks:
        bench.say(worker, worker.heartbeat())
    bench.say(hung, hung.report())  # Counters of the old epoch are no fault.
    notice(bench, hung)
    bench.tick(seconds=0.6)
    assert {worker.epoch for worker in bench.ranks} == {3}
    serve_all(bench)
    check(bench)
    assert bench.pool.counters.refusals.all() == ()


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
    reform = next(bound for bound in bench.pool.counters.bounds.all() if bound.name == "reform")
    assert reform.reached == 1
    assert "worker-0 did not leave it within 5 s" in reform.latest


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
def test_a_death_while_ranks_form_anew_is_followed_by_another_epoch(bench_of_six, second):
    bench = bench_of_six
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    die(bench, bench.ranks[second])
    assert {worker.epoch for worker in bench.ranks} == {3}
    assert len(bench.ranks) == 4
    serve_all(bench)
    check(bench)


def test_two_deaths_at_once_are_one_epoch(bench_of_six):
    bench = bench_of_six
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
    assert next(b for b in bench.pool.counters.bounds.all() if b.name == "meet").reached == 1
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
    assert bench.pool.counters.refusals.all() == ()


def test_a_worker_that_leaves_is_not_waited_for(serving_bench):
    bench = serving_bench
    leaver = bench.ranks[2]
    bench.say(leaver, Leaving(reason="SIGTERM"))
    del bench.workers[leaver.hello.worker]
    notice(bench, *bench.ranks)
    bench.lose(leaver)
    serve_all(bench)
    check(bench)
    assert "it left: SIGTERM" in bench.pool.membership.epochs[0].reason


def test_averages_survive_a_change_of_ranks_and_planning_goes_on(serving_bench, skewed):
    bench = serving_bench
    bench.run_traffic(skewed(1), seconds=10)
    before = bench.pool.windows.average_load(MODEL)
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    np.testing.assert_allclose(bench.pool.windows.average_load(MODEL), before)
    serve_all(bench)
    np.testing.assert_allclose(bench.pool.windows.average_load(MODEL), before)
    bench.run_traffic(skewed(1), seconds=20)
    assert bench.pool.counters.refusals.all() == ()
    assert bench.pool.windows.closed[-1].rank_load.shape == (3, 4 - 1)
    check(bench)


def test_the_pause_of_an_epoch_is_measured(serving_bench):
    bench = serving_bench
    die(bench, bench.ranks[0])
    notice(bench, *bench.ranks)
    bench.now += 2.5
    serve_all(bench)
    newest = bench.pool.membership.epochs[0]
    assert newest.epoch == 2
    assert newest.serving_after_s == pytest.approx(2.5)
    assert newest.workers == tuple(names(bench))

"""A pool whose ranks die, hang or leave, at every moment that matters."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.service.status import pool_summary
from equipoise.planning.moves import CheckpointSource
from equipoise.pool.effects import WriteAdopted, WriteMembership
from equipoise.pool.health import Health
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import Leaving
from tests.support.deaths import (
    check,
    die,
    lost,
    names,
    notice,
    serve_all,
    trouble,
    with_spare_slots,
)
from tests.support.scripted_worker import MODEL
from tests.support.store_records import A_DECISION


@pytest.fixture
def serving_harness(make_harness):
    harness = with_spare_slots(make_harness())
    harness.serve()
    return harness


@pytest.fixture
def bench_of_six(make_harness):
    harness = with_spare_slots(make_harness(num_ranks=6))
    harness.serve()
    return harness


@pytest.mark.parametrize("victim", range(4))
def test_the_survivors_of_a_death_serve_on_with_all_experts(serving_harness, victim):
    harness = serving_harness
    before = harness.pool.layouts.current
    die(harness, harness.ranks[victim])
    survivors = harness.ranks
    notice(harness, *survivors)
    assert all(worker.epoch == 2 for worker in survivors)
    serve_all(harness)
    check(harness)
    layout = harness.pool.layouts.current
    assert layout.num_ranks == 3
    assert layout.generation == before.generation + 1
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason == (
        "3 of 4 ranks: start 1 more worker, or restart the others with --num-ranks=3"
    )
    assert pool_summary(harness.pool).num_ranks == 4
    (join_epoch,) = [
        sent for sent in harness.sent_to("worker-3", JoinEpoch) if sent.epoch == 2
    ] or [harness.ranks[0].join_epoch]
    assert join_epoch.rendezvous_address == f"{names(harness)[0]}:2"


def test_survivors_keep_their_slots_and_pull_what_is_lost_from_each_other(serving_harness):
    harness = serving_harness
    dead, *survivors = harness.ranks
    held = {worker.hello.worker: worker.own(worker.layout.expert_of_slot) for worker in survivors}
    die(harness, dead)
    notice(harness, *survivors)
    for worker in harness.ranks:
        now = worker.own(worker.layout.expert_of_slot)
        changed = np.argwhere(now != held[worker.hello.worker])
        first = worker.rank * 12
        moves = worker.join_epoch.moves
        assert {(move.layer, move.slot - first) for move in moves} == set(map(tuple, changed))
        for move in moves:
            assert move.sources[-1] == CheckpointSource()
            for source in move.sources[:-1]:
                holder = harness.ranks[source.rank].hello.worker
                assert move.expert in held[holder][move.layer]


def test_nothing_is_sent_before_the_layout_and_the_membership_are_written(serving_harness):
    harness = serving_harness
    harness.store_fault = "the disk is full"
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    harness.tick(seconds=1.0)
    assert all(worker.epoch == 1 for worker in harness.ranks)
    assert "the disk is full" in harness.pool.diagnosis().reason
    harness.store_fault = ""
    harness.sent.clear()
    harness.tick(seconds=1.0)
    adopted, membership = harness.writes[-2:]
    assert isinstance(adopted, WriteAdopted)
    assert isinstance(membership, WriteMembership)
    assert all(worker.epoch == 2 for worker in harness.ranks)
    serve_all(harness)
    check(harness)


def test_an_epoch_opens_after_a_verdict_that_the_store_did_not_accept(
    serving_harness,
):
    harness = serving_harness
    stubborn, *others = harness.ranks
    notice(harness, *others)
    live_for(harness, harness.ranks, seconds=4)
    assert stubborn.epoch == others[0].epoch == 1
    harness.pool.journal._late.append(A_DECISION)
    harness.store_fault = "the disk is full"
    live_for(harness, harness.ranks, seconds=1)
    harness.store_fault = ""
    live_for(harness, harness.ranks, seconds=2)
    assert {worker.epoch for worker in others} == {2}
    assert harness.decisions() == [A_DECISION]


def test_a_worker_that_never_saw_an_epoch_is_not_left_out_for_it(bench_of_six):
    harness = bench_of_six
    harness.store_fault = "the disk is full"
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    silent, *others = harness.ranks
    live_for(harness, others, seconds=7)
    harness.store_fault = ""
    live_for(harness, harness.ranks, seconds=1)
    assert (silent.epoch, {worker.epoch for worker in others}) == (1, {3})
    for worker in others:
        harness.say(worker, worker.serving())
    live_for(harness, harness.ranks, seconds=2)
    assert {worker.epoch for worker in harness.ranks} == {4}
    serve_all(harness)
    check(harness)


def live_for(harness, workers, *, seconds):
    """Time in which these workers send heartbeats, and nothing else."""
    for _ in range(seconds):
        harness.now += 1.0
        for worker in workers:
            harness.say(worker, worker.heartbeat())
        harness.tick()


def test_a_hung_rank_is_left_out_when_it_is_silent_and_taken_in_when_it_wakes(serving_harness):
    harness = serving_harness
    hung, *others = harness.ranks
    live_for(harness, others, seconds=4)
    notice(harness, *others)
    assert "waiting for worker-0 to leave it" in harness.pool.diagnosis().reason
    harness.tick(seconds=1.1)
    assert {worker.epoch for worker in others} == {2}
    assert hung.epoch == 1
    for worker in others:
        harness.say(worker, worker.serving())
    assert trouble(harness.pool) == ""
    assert next(b for b in harness.pool.counters.timeouts.all() if b.name == "report").reached == 1

    for worker in harness.ranks:
        harness.say(worker, worker.heartbeat())
    harness.say(hung, hung.report())  # Counters of the old epoch are no fault.
    notice(harness, hung)
    harness.tick(seconds=0.6)
    assert {worker.epoch for worker in harness.ranks} == {3}
    serve_all(harness)
    check(harness)
    assert harness.pool.counters.rejections.all() == ()


def test_a_group_that_only_some_gave_up_is_reformed_without_the_others_at_the_bound(
    serving_harness,
):
    harness = serving_harness
    stubborn, *others = harness.ranks
    notice(harness, *others)
    for _ in range(5):
        harness.now += 1.0
        for worker in harness.ranks:
            harness.say(worker, worker.heartbeat())
        harness.tick()
    assert stubborn.epoch == 1
    assert {worker.epoch for worker in others} == {2}
    reform = next(bound for bound in harness.pool.counters.timeouts.all() if bound.name == "reform")
    assert reform.reached == 1
    assert "worker-0 did not leave it within 5 s" in reform.latest


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("moment", ["staging", "staged", "some switched"])
def test_a_death_during_a_rollout_ends_it_and_its_number_is_not_used_again(
    serving_harness, skewed, victim, moment
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    generation = harness.pool.rollouts.current.target.generation
    if moment != "staging":
        harness.stage_all()
    if moment == "some switched":
        switched = harness.ranks[(victim + 1) % 4]
        harness.say(switched, switched.switch())
    die(harness, harness.ranks[victim])
    notice(harness, *harness.ranks)
    serve_all(harness)
    check(harness)
    assert harness.pool.rollouts.current is None
    assert harness.pool.layouts.current.generation > generation
    assert trouble(harness.pool) == ""


@pytest.mark.parametrize("second", range(3))
def test_a_death_while_ranks_re_form_is_followed_by_another_epoch(bench_of_six, second):
    harness = bench_of_six
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    die(harness, harness.ranks[second])
    assert {worker.epoch for worker in harness.ranks} == {3}
    assert len(harness.ranks) == 4
    serve_all(harness)
    check(harness)


def test_two_deaths_at_once_are_one_epoch(bench_of_six):
    harness = bench_of_six
    die(harness, *harness.ranks[:2])
    notice(harness, *harness.ranks)
    assert {worker.epoch for worker in harness.ranks} == {2}
    serve_all(harness)
    check(harness)


def test_ranks_that_did_not_meet_retry_with_the_remaining_ones(serving_harness):
    harness = serving_harness
    die(harness, harness.ranks[3])
    notice(harness, *harness.ranks)
    harness.now += 60.0
    for worker in harness.ranks:
        harness.say(worker, worker.heartbeat())
    notice(harness, *harness.ranks)
    assert {worker.epoch for worker in harness.ranks} == {3}
    assert next(b for b in harness.pool.counters.timeouts.all() if b.name == "meet").reached == 1
    serve_all(harness)
    check(harness)


@pytest.mark.parametrize("reconnects", [False, True])
def test_a_rank_that_never_serves_is_left_out_at_the_timeout_and_may_return(
    make_harness, policy, reconnects
):
    harness = with_spare_slots(make_harness(policy=replace(policy, join_timeout_s=60.0)))
    harness.assemble()
    late, *others = harness.ranks
    for worker in others:
        harness.say(worker, worker.serving())
    live_for(harness, harness.ranks, seconds=40)
    if reconnects:  # A stream that breaks again and again must not extend the wait.
        harness.hello(late.hello)
    live_for(harness, harness.ranks, seconds=19)
    assert {worker.epoch for worker in others} == {1}
    live_for(harness, harness.ranks, seconds=2)
    assert {worker.epoch for worker in others} == {2}
    assert late.epoch == 1
    for worker in others:
        harness.say(worker, worker.serving())
    reason = harness.pool.membership.epochs[0].reason
    assert reason == f"{late.hello.worker} did not serve within 60 s"
    (join,) = (one for one in harness.pool.counters.timeouts.all() if one.name == "join")
    assert (join.timeout_s, join.reached, join.latest) == (60.0, 1, reason)
    notice(harness, late)
    harness.tick(seconds=0.6)
    serve_all(harness)
    check(harness)


def test_ranks_none_of_which_serves_are_sent_another_epoch(make_harness, policy):
    harness = make_harness(policy=replace(policy, join_timeout_s=60.0))
    harness.assemble()
    assert {worker.join_epoch.join_timeout_s for worker in harness.ranks} == {60.0}
    live_for(harness, harness.ranks, seconds=61)
    assert {worker.epoch for worker in harness.ranks} == {2}
    live_for(harness, harness.ranks, seconds=61)
    assert {worker.epoch for worker in harness.ranks} == {3}
    serve_all(harness)
    check(harness)


def test_a_message_of_an_earlier_epoch_is_no_fault(serving_harness):
    harness = serving_harness
    late = harness.ranks[1]
    words = (late.serving(), late.report(), lost(late))
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    for word in words:
        harness.say(late, word)
    serve_all(harness)
    check(harness)
    assert harness.pool.roster.epoch == 2
    assert harness.pool.counters.rejections.all() == ()


def test_a_worker_that_leaves_is_not_waited_for(serving_harness):
    harness = serving_harness
    leaver = harness.ranks[2]
    harness.say(leaver, Leaving(reason="SIGTERM"))
    del harness.workers[leaver.hello.worker]
    notice(harness, *harness.ranks)
    harness.lose(leaver)
    serve_all(harness)
    check(harness)
    assert "it left: SIGTERM" in harness.pool.membership.epochs[0].reason


def test_averages_survive_a_change_of_ranks_and_planning_continues(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    before = harness.pool.windows.average_load(MODEL)
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    np.testing.assert_allclose(harness.pool.windows.average_load(MODEL), before)
    serve_all(harness)
    np.testing.assert_allclose(harness.pool.windows.average_load(MODEL), before)
    harness.run_traffic(skewed(1), seconds=20)
    assert harness.pool.counters.rejections.all() == ()
    assert harness.pool.windows.closed[-1].rank_load.shape == (3, 4 - 1)
    check(harness)


def test_the_pause_of_an_epoch_is_measured(serving_harness):
    harness = serving_harness
    die(harness, harness.ranks[0])
    notice(harness, *harness.ranks)
    harness.now += 2.5
    serve_all(harness)
    newest = harness.pool.membership.epochs[0]
    assert newest.epoch == 2
    assert newest.serving_after_s == pytest.approx(2.5)
    assert newest.workers == tuple(names(harness))

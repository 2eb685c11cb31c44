"""A pool's life: assembly, loads, decisions, rollouts."""

from dataclasses import replace

import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.pool.effects import WriteAdopted, WriteCommitted, WriteMembership, WriteProposed
from equipoise.pool.health import Health
from equipoise.wire.balancer_messages import Abort, JoinEpoch, Stage
from tests.support.pool_harness import PoolHarness


def test_no_rank_is_assigned_before_the_last_worker_connects(harness):
    for worker in list(harness.workers.values())[:3]:
        harness.hello(worker.hello)
    harness.tick(1.0)
    assert harness.sent == []
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.WAITING
    assert "3 of 4" in diagnosis.reason


def test_the_last_worker_opens_epoch_1_with_ranks_of_a_node_side_by_side(harness):
    harness.assemble()
    assert [worker.hello.worker for worker in harness.ranks] == [
        "worker-0",
        "worker-2",
        "worker-1",
        "worker-3",
    ]
    for rank, worker in enumerate(harness.ranks):
        assert worker.epoch == 1
        assert worker.rank == rank
        assert [peer.worker for peer in worker.join_epoch.peers] == [
            other.hello.worker for other in harness.ranks
        ]
        assert worker.join_epoch.rendezvous_address == "worker-0:2"


def test_a_new_pool_starts_in_the_contiguous_layout_and_it_is_written_before_anybody_hears(harness):
    harness.assemble()
    assert isinstance(harness.writes[0], WriteAdopted)
    assert isinstance(harness.writes[1], WriteMembership)
    expected = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
    assert harness.ranks[0].layout.same_placement(expected)
    assert harness.pool.layouts.stored_generation == 1


def test_a_pool_serves_once_every_rank_says_so(harness):
    harness.assemble()
    assert "to load experts" in harness.pool.diagnosis().reason
    for worker in harness.ranks:
        harness.say(worker, worker.serving())
    assert harness.pool.diagnosis().health is Health.SERVING


def test_the_reason_for_the_health_of_a_large_pool_names_a_few_and_counts_the_others():
    harness = PoolHarness(num_ranks=16)
    harness.assemble()
    waiting = "waiting for worker-0, worker-10, worker-12, worker-14 and 12 more to load experts"
    assert harness.pool.diagnosis().reason == waiting
    for worker in harness.ranks:
        harness.say(worker, worker.serving())
    for worker in harness.ranks[:7]:
        harness.lose(worker, reason="its stream was cut")
    reason = harness.pool.diagnosis().reason
    assert "rank 3 (worker-14) is gone: its stream was cut and 3 more" in reason
    assert "rank 4" not in reason


def test_skewed_traffic_is_planned_staged_switched_and_committed(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    (decision,) = harness.decisions()
    assert decision.accepted, decision.reason
    assert [
        write.layout.generation for write in harness.writes if isinstance(write, WriteProposed)
    ] == [2]
    stages = {rank: worker.staged for rank, worker in enumerate(harness.ranks)}
    assert all(stage is not None and stage.base_generation == 1 for stage in stages.values())
    moved = {move.slot // 10 for stage in stages.values() for move in stage.moves}
    assert moved, "at least one rank has moves"
    assert all(move.slot // 10 == rank for rank, stage in stages.items() for move in stage.moves)
    harness.stage_all()
    for worker in harness.ranks[:3]:
        harness.say(worker, worker.switch())
    assert harness.pool.layouts.stored_generation == 1, "not all ranks have reported"
    last = harness.ranks[3]
    harness.say(last, last.switch())
    assert harness.writes[-1] == WriteCommitted(generation=2, previous=1)
    assert harness.pool.layouts.stored_generation == 2
    assert harness.pool.rollouts.completed == 1
    switch = harness.pool.rollouts.switches[0]
    assert (switch.generation, switch.step, switch.max_stall_us) == (2, 70, 103)


def test_the_balance_of_a_window_is_what_receivers_measured(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    before = harness.pool.windows.closed[-1]
    rank_load = before.rank_load
    expected = (rank_load.mean(axis=1) / rank_load.max(axis=1)).mean()
    assert before.balancedness == pytest.approx(expected)
    harness.run_traffic(skewed(1), seconds=10)
    after = harness.pool.windows.closed[-1]
    assert after.balancedness > before.balancedness + 0.1
    assert after.balancedness == pytest.approx(
        harness.decisions()[0].balancedness_proposed, abs=0.01
    )


def test_a_report_more_or_less_in_a_window_is_no_imbalance(serving_harness):
    harness = serving_harness
    # Loads in proportion to replicas weigh the same in every slot.
    even = harness.ranks[0].layout.replica_counts() * 1000.0
    harness.run_traffic(even, seconds=10)
    assert harness.pool.windows.closed[-1].balancedness == pytest.approx(1.0)
    late = harness.ranks[0]
    for second in range(10):
        harness.now += 1.0
        for worker in harness.ranks:
            worker.serve_traffic(even)
            if not (worker is late and second > 6):
                harness.say(worker, worker.report())
        harness.tick()
    assert harness.pool.windows.num_closed == 2
    assert harness.pool.windows.closed[-1].balancedness == pytest.approx(1.0)


def test_balance_recovers_within_two_windows_of_an_abrupt_shift(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=60)
    settled = harness.pool.windows.closed[-1].balancedness
    assert settled > 0.83
    # The shift falls into the middle of a window, as shifts do.
    harness.run_traffic(skewed(1), seconds=4)
    harness.run_traffic(skewed(2), seconds=6)
    assert harness.pool.windows.closed[-1].balancedness < settled - 0.05
    harness.run_traffic(skewed(2), seconds=20)
    assert any(window.shift.detected for window in list(harness.pool.windows.closed)[-3:])
    harness.run_traffic(skewed(2), seconds=10)
    assert harness.pool.windows.closed[-1].balancedness > settled - 0.02


def test_balanced_traffic_is_left_alone_with_a_reason(serving_harness):
    harness = serving_harness
    layout = harness.ranks[0].layout
    # Loads in proportion to replicas weigh the same in every slot.
    harness.run_traffic(layout.replica_counts() * 1000.0, seconds=10)
    (decision,) = harness.decisions()
    assert not decision.accepted
    assert decision.reason
    assert harness.sent_to("worker-0", Stage) == []


def test_a_plan_of_many_layers_goes_out_in_waves_one_at_a_time(make_harness, skewed):
    # Less than any layer needs: each goes out in a wave of its own, at whatever cost.
    policy = Policy(interval_s=10.0, min_assignments=100.0, max_wave_bytes=1, payback_s=86_400.0)
    harness = make_harness(policy=policy)
    harness.serve()
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    assert harness.pool.rollouts.waves_left == 2
    assert len(harness.sent_to("worker-0", Stage)) == 1
    harness.carry_out_rollout()
    stages = harness.sent_to("worker-0", Stage)
    assert [stage.layout.generation for stage in stages] == [2, 3, 4]
    assert [stage.base_generation for stage in stages] == [1, 2, 3]
    assert harness.pool.layouts.stored_generation == 4
    assert harness.pool.rollouts.completed == 1, "a plan counts once, however many waves it took"


def test_idle_windows_give_no_verdict(serving_harness):
    serving_harness.tick(seconds=10)
    assert serving_harness.pool.windows.num_closed == 1
    assert serving_harness.decisions() == []


def test_a_verdict_for_a_pool_that_changed_meanwhile_is_no(serving_harness, skewed):
    harness = serving_harness
    captured = []
    harness.controller.proposed, proposed = (
        lambda proposal, **_: captured.append(proposal) or (),
        harness.controller.proposed,
    )
    harness.run_traffic(skewed(1), seconds=10)
    harness.lose(harness.ranks[1])
    harness.perform(proposed(captured[0], plan_ms=1.0, now=harness.now))
    (decision,) = harness.decisions()
    assert not decision.accepted
    assert "changed while" in decision.reason


# Rollouts that do not come to their end ----------------------------------------------------------


def staging(harness, skewed):
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    assert harness.pool.rollouts.current is not None


def test_a_rejection_aborts_on_all_ranks_and_the_next_window_tries_a_new_number(
    serving_harness, skewed
):
    harness = serving_harness
    staging(harness, skewed)
    harness.say(harness.ranks[0], harness.ranks[0].answer_staged())
    harness.say(harness.ranks[1], harness.ranks[1].reject("no memory for 3 experts"))
    for worker in harness.ranks:
        (abort,) = harness.sent_to(worker.hello.worker, Abort)
        assert abort.generation == 2
        assert "no memory for 3 experts" in abort.reason
    assert harness.pool.rollouts.aborted == 1
    assert harness.pool.layouts.stored_generation == 1
    taken_back = harness.pool.journal.last_decision
    assert not taken_back.accepted
    assert "generation 2 was aborted: rank 1 rejected it: no memory" in taken_back.reason
    harness.run_traffic(skewed(1), seconds=10)
    assert harness.pool.layouts.stored_generation == 3, "an aborted number is not used again"


def test_a_rank_that_is_lost_before_the_switch_aborts_the_rollout(serving_harness, skewed):
    harness = serving_harness
    staging(harness, skewed)
    harness.lose(harness.ranks[2], reason="its stream was cut")
    (abort,) = harness.sent_to("worker-0", Abort)
    assert "rank 2" in abort.reason
    assert "its stream was cut" in abort.reason


def test_staging_that_takes_too_long_is_aborted(serving_harness, skewed):
    harness = serving_harness
    staging(harness, skewed)
    for worker in harness.ranks[:3]:
        harness.say(worker, worker.answer_staged())
    for _ in range(31):
        for worker in harness.ranks:
            harness.say(worker, worker.heartbeat())
        harness.tick(seconds=1.0)
    (abort,) = harness.sent_to("worker-0", Abort)
    assert "rank 3" in abort.reason


def test_a_switch_that_crosses_its_abort_is_accepted(serving_harness, skewed):
    harness = serving_harness
    staging(harness, skewed)
    staged = {worker.hello.worker: worker.staged for worker in harness.ranks}
    for worker in harness.ranks[:3]:
        harness.say(worker, worker.answer_staged())
    harness.lose(harness.ranks[0])
    assert harness.pool.rollouts.aborted == 1
    for worker in harness.ranks:
        worker.staged = staged[worker.hello.worker]
    switches = [worker.switch() for worker in harness.ranks]
    harness.hello(harness.ranks[0].reconnecting())
    for worker, switched in zip(harness.ranks, switches, strict=True):
        harness.say(worker, switched)
    assert harness.pool.layouts.stored_generation == 2
    assert harness.pool.rollouts.aborted == 1  # A counter never decreases.
    assert harness.pool.rollouts.completed == 1
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_staged_generation_without_a_rollout_is_dropped_after_a_heartbeat(
    serving_harness, skewed
):
    harness = serving_harness
    staging(harness, skewed)
    stage = harness.ranks[0].staged
    harness.say(harness.ranks[1], harness.ranks[1].reject("no"))
    harness.ranks[0].staged = stage
    harness.sent.clear()
    harness.say(harness.ranks[0], harness.ranks[0].heartbeat())
    (abort,) = harness.sent_to(harness.ranks[0].hello.worker, Abort)
    assert abort.generation == 2


def test_a_store_that_fails_stops_planning_and_nothing_is_staged(serving_harness, skewed):
    harness = serving_harness
    harness.store_fault = "disk full"
    harness.run_traffic(skewed(1), seconds=20)
    assert harness.sent_to("worker-0", Stage) == []
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert "disk full" in diagnosis.reason
    harness.store_fault = ""
    harness.run_traffic(skewed(1), seconds=50)
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.rollouts.completed == 1


def test_an_epoch_is_not_announced_before_it_is_written_and_ticks_try_again(harness):
    harness.store_fault = "disk full"
    harness.assemble()
    assert harness.sent == []
    harness.tick()
    assert harness.sent == []
    harness.store_fault = ""
    harness.tick()
    assert all(len(harness.sent_to(name, JoinEpoch)) == 1 for name in harness.workers)


def test_a_rank_that_takes_no_new_request_is_leaving_until_it_does_again(serving_harness):
    harness = serving_harness

    def states():
        return [rank.state for rank in pool_status(harness.pool, now=harness.now).ranks]

    revision = harness.pool.revision
    harness.say(harness.ranks[2], replace(harness.ranks[2].heartbeat(), draining=True))
    assert states() == ["connected", "connected", "leaving", "connected"]
    assert harness.pool.revision > revision
    harness.say(harness.ranks[2], harness.ranks[2].heartbeat())
    assert states() == ["connected"] * 4


def test_a_plan_is_given_the_samples_of_the_average_that_it_is_for(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    window = harness.pool.windows.latest_with_traffic
    request = harness.pool.decisions.proposal_request(
        window, policy=harness.pool.policy.values, now=harness.now
    )
    assert request.samples == pytest.approx(window.assignments / len(window.load), rel=0.01)

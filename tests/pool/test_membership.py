"""Which workers may join a pool or return to it, and the reasons of rejections."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.errors import InvalidReportError
from equipoise.planning.layout import Layout
from equipoise.planning.topology import ModelShape
from equipoise.pool.health import Health
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.wire.balancer_messages import HeartbeatAck, JoinEpoch, Rejection
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Leaving


def rejection_of(harness, hello):
    with pytest.raises(RejectedWorkerError) as caught:
        harness.hello(hello)
    return caught.value


# Workers that do not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "theirs", "ours"),
    [
        (
            "hello_model",
            {"model": ModelShape(num_layers=4, num_experts=32, num_groups=8, expert_bytes=1000)},
            "num_layers=4",
            "num_layers=3",
        ),
        ("hello_slots", {"slots_per_rank": 11}, "11", "10"),
    ],
)
def test_a_worker_that_differs_from_its_pool_is_rejected_with_both_values(
    serving_harness, hello_of, kind, changes, theirs, ours
):
    error = rejection_of(serving_harness, hello_of("worker-9", **changes))
    assert error.kind == kind
    for word in ("worker-9", theirs, ours, "worker-0"):
        assert word in str(error)
    assert serving_harness.pool.roster.settled, "nothing changed"


AUTO = ("gemm=triton|reference", "permute=triton|reference")


@pytest.mark.parametrize(
    ("backends", "operation"),
    [
        (("model=torch",), "gemm"),
        (("gemm=deep_gemm", "permute=triton"), "gemm"),
        # The first could, and the second could not.
        (("gemm=triton", "permute=reference"), "permute"),
    ],
)
def test_a_worker_whose_kernels_cannot_agree_with_those_present_is_rejected(
    harness, hello_of, backends, operation
):
    of_workers = (AUTO, ("gemm=triton", "permute=triton"), (), AUTO)
    for worker, of_worker in zip(harness.workers.values(), of_workers, strict=True):
        worker.hello = replace(worker.hello, backends=of_worker)
    harness.serve()
    error = rejection_of(harness, hello_of("worker-9", kernels="odd", backends=backends))
    assert error.kind == "hello_kernels"
    assert "worker-9: it computes with odd, but pool tiny with triton" in str(error)
    assert f"(worker worker-0), and no backend of {operation} is available to all" in str(error)
    assert sorted(harness.pool.roster.members) == [f"worker-{n}" for n in range(4)]
    harness.hello(hello_of("worker-9", backends=AUTO))


def test_a_pool_that_cannot_hold_all_experts_is_rejected_with_the_number_that_could(
    harness, hello_of
):
    error = rejection_of(harness, hello_of(slots_per_rank=7))
    assert error.kind == "hello_too_few_slots"
    assert "at least 8 slots" in str(error)
    assert harness.pool.roster.shape is None, "nothing changed"


def test_once_everybody_has_left_another_shape_may_come(harness, hello_of):
    harness.hello(hello_of("worker-0"))
    harness.perform(harness.controller.lost("worker-0", reason="its stream ended", now=harness.now))
    harness.hello(hello_of("worker-0", slots_per_rank=16))
    assert harness.pool.roster.shape.slots_per_rank == 16


def test_a_worker_of_another_epoch_is_rejected(serving_harness, worker_of, hello_of):
    stray = serving_harness.ranks[3]
    hello = stray.reconnecting()
    error = rejection_of(serving_harness, replace(hello, running=replace(hello.running, epoch=9)))
    assert error.kind == "hello_epoch"
    assert "epoch 9" in str(error)
    assert "epoch 1" in str(error)


def test_two_workers_cannot_run_as_one_rank(serving_harness):
    first, second = serving_harness.ranks[:2]
    serving_harness.lose(second)
    hello = second.reconnecting()
    error = rejection_of(serving_harness, replace(hello, running=replace(hello.running, rank=0)))
    assert error.kind == "hello_rank_taken"
    assert first.hello.worker in str(error)


def test_two_layouts_cannot_share_a_number(serving_harness):
    stray = serving_harness.ranks[3]
    hello = stray.reconnecting()
    mirrored = stray.layout.expert_of_slot[:, ::-1]
    other = stray.layout.with_placement(mirrored, generation=1)
    error = rejection_of(
        serving_harness, replace(hello, running=replace(hello.running, layout=other))
    )
    assert error.kind == "hello_layout"


@pytest.mark.parametrize("rank", [0, 4])
def test_an_outsider_does_not_change_the_number_of_ranks(serving_harness, hello_of, rank):
    pool, member = serving_harness.pool, serving_harness.ranks[0]
    layout = member.layout
    wider = Layout(
        generation=layout.generation + 7,
        num_experts=layout.num_experts,
        num_ranks=5,
        expert_of_slot=np.concatenate(
            [layout.expert_of_slot, layout.expert_of_slot[:, : layout.slots_per_rank]], axis=1
        ),
    )
    running = replace(member.reconnecting().running, rank=rank, layout=wider)
    outsider = replace(hello_of("worker-9"), running=running)
    assert rejection_of(serving_harness, outsider).kind == "hello_num_ranks"
    assert (pool.roster.num_ranks, pool.roster.complete) == (4, True)
    assert pool.diagnosis().health is Health.SERVING


# Coming and going --------------------------------------------------------------------------------


def test_a_gone_rank_degrades_the_pool_until_it_reconnects(serving_harness):
    harness = serving_harness
    worker = harness.ranks[2]
    harness.lose(worker, reason="its stream was cut")
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert "rank 2 (worker-1) is gone: its stream was cut" in diagnosis.reason
    harness.sent.clear()
    harness.hello(worker.reconnecting())
    assert harness.pool.diagnosis().health is Health.SERVING
    (join_epoch,) = harness.sent_to("worker-1", JoinEpoch)
    assert (join_epoch.epoch, join_epoch.rank) == (1, 2)
    assert join_epoch.layout.generation == 1


def test_a_worker_that_reconnects_before_it_served_keeps_its_rank(harness):
    harness.assemble()
    worker = harness.ranks[1]
    harness.lose(worker)
    harness.sent.clear()
    harness.hello(worker.hello)
    (join_epoch,) = harness.sent_to(worker.hello.worker, JoinEpoch)
    assert (join_epoch.epoch, join_epoch.rank) == (1, 1)


def test_a_silent_rank_is_named_and_counts_again_when_it_speaks(serving_harness):
    harness = serving_harness
    silent = harness.ranks[1]
    for _ in range(6):
        harness.now += 1.0
        for worker in harness.ranks:
            if worker is not silent:
                harness.say(worker, worker.heartbeat())
        harness.tick()
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert "rank 1 has been silent for 6.0 s" in diagnosis.reason
    harness.say(silent, silent.heartbeat())
    harness.tick()
    assert harness.pool.diagnosis().health is Health.SERVING


@pytest.mark.parametrize("reports", [False, True])
def test_a_rank_without_a_valid_heartbeat_counts_as_silent_until_it_sends_one(
    serving_harness, reports
):
    harness = serving_harness
    liar, *others = harness.ranks
    for _ in range(6):
        harness.now += 1.0
        for worker in others:
            harness.say(worker, worker.heartbeat())
        invalid = {"kind": "heartbeat_generation", "reason": "worker-0: generation -1"}
        harness.perform(harness.controller.reject("worker-0", **invalid))
        if reports:
            harness.say(liar, liar.report())
        harness.tick()
    assert harness.pool.diagnosis().health is Health.DEGRADED
    assert (
        "rank 0 has sent no valid heartbeat for 6.0 s, more than the allowed 5 s; the latest "
        "message was rejected: worker-0: generation -1" in harness.pool.diagnosis().reason
    )
    assert harness.pool.roster.epoch == 1, "the group serves"
    harness.say(liar, liar.heartbeat())
    harness.tick()
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_rank_whose_reports_are_rejected_lives_by_its_heartbeats(serving_harness):
    harness = serving_harness
    for _ in range(6):
        harness.now += 1.0
        for worker in harness.ranks:
            harness.say(worker, worker.heartbeat())
        harness.perform(harness.controller.reject("worker-0", kind="load", reason="bad"))
        harness.tick()
    assert harness.pool.diagnosis().health is Health.SERVING


def test_nothing_is_planned_while_a_rank_is_missing(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=9)
    harness.lose(harness.ranks[0])
    harness.tick(seconds=1.0)
    assert harness.pool.windows.num_closed == 1
    assert harness.decisions() == []


def test_a_restarted_fleet_gets_a_new_epoch_and_the_committed_layout(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    committed = harness.pool.layouts.committed
    assert committed.generation == 2
    for number, worker in enumerate(harness.ranks):
        harness.lose(worker)
        worker.hello = replace(worker.hello, boot_id=f"boot-2-{number}")
        harness.hello(worker.hello)
        if number < 3:
            reason = harness.pool.diagnosis().reason
            assert worker.hello.worker in reason
            assert "joins shortly" in reason
    for worker in harness.ranks:
        assert worker.epoch == 2
        assert worker.layout.same_placement(committed)
        harness.say(worker, worker.serving())
    assert harness.pool.diagnosis().health is Health.SERVING
    harness.run_traffic(skewed(1), seconds=10)
    assert harness.pool.counters.rejections.all() == (), (
        "counters of the new boots are no shrinking ones"
    )


def test_a_newer_boot_takes_the_place_of_one_that_seems_connected(serving_harness):
    harness = serving_harness
    worker = harness.ranks[0]
    harness.hello(replace(worker.hello, boot_id="boot-2"))
    assert harness.pool.roster.members[worker.hello.worker].hello.boot_id == "boot-2"
    assert "worker-0 joins shortly" in harness.pool.diagnosis().reason


def test_a_worker_that_leaves_says_so_and_is_gone_when_its_stream_ends(serving_harness):
    harness = serving_harness
    harness.say(harness.ranks[0], Leaving(reason="SIGTERM"))
    harness.lose(harness.ranks[0], reason="it left: SIGTERM")
    assert "it left: SIGTERM" in harness.pool.diagnosis().reason


# Messages that cannot be used --------------------------------------------------------------------


def test_a_heartbeat_is_answered_with_its_number(serving_harness):
    harness = serving_harness
    harness.say(harness.ranks[0], harness.ranks[0].heartbeat(sequence=41))
    assert harness.sent_to("worker-0", HeartbeatAck) == [HeartbeatAck(sequence=41)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("staged_epoch", {"epoch": 2}),
        ("staged_rank", {"rank": 3}),
        ("staged_generation", {"generation": 99}),
    ],
)
def test_answers_for_another_epoch_rank_or_future_are_rejected(
    serving_harness, skewed, kind, changes
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    worker = harness.ranks[0]
    with pytest.raises(InvalidMessageError) as caught:
        harness.say(worker, replace(worker.answer_staged(), **changes))
    assert caught.value.kind == kind
    assert not harness.pool.rollouts.current.staged_ranks


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("report_wrong_epoch", {"epoch": 2}),
        ("report_unknown_rank", {"rank": 3}),
        ("report_future_generation", {"generation": 99}),
        ("report_shrinking_counter", {"assignments": np.zeros((3, 10), dtype=np.uint64)}),
        ("report_shape", {"assignments": np.zeros((3, 11), dtype=np.uint64)}),
    ],
)
def test_reports_that_cannot_be_true_are_rejected_and_the_load_stays(
    serving_harness, skewed, kind, changes
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=9)
    worker = harness.ranks[0]
    bad = worker.report()
    with pytest.raises(InvalidReportError) as caught:
        harness.say(worker, replace(bad, load=replace(bad.load, **changes)))
    assert caught.value.kind == kind
    harness.run_traffic(skewed(1), seconds=1)
    assert harness.pool.windows.closed[-1].assignments == pytest.approx(3 * 10 * 10_000, rel=0.01)


def test_a_rejected_message_is_counted_and_reported_to_its_sender(serving_harness):
    harness = serving_harness
    chain = harness.controller.reject("worker-1", kind="report_shape", reason="bad")
    harness.perform(chain)
    assert harness.sent_to("worker-1", Rejection) == [Rejection(reason="bad", fatal=False)]
    (rejection,) = harness.pool.counters.rejections.all()
    assert (rejection.kind, rejection.count, rejection.latest) == ("report_shape", 1, "bad")


def test_a_repeated_report_counts_once(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=9)
    for worker in harness.ranks:
        harness.say(worker, worker.report())
    harness.tick(seconds=1.0)
    assert harness.pool.windows.closed[-1].assignments == pytest.approx(3 * 9 * 10_000, rel=0.01)


def test_a_worker_returns_although_another_one_left_rank_0(serving_harness):
    first, second, third, _ = serving_harness.ranks
    for worker in (first, second, third):
        serving_harness.lose(worker)
    mistaken = first.reconnecting()
    running = replace(mistaken.running, rank=second.rank)
    error = rejection_of(serving_harness, replace(mistaken, running=running))
    assert error.kind == "hello_rank_taken"
    assert second.hello.worker in str(error)
    hello = replace(third.hello, highest_epoch=third.epoch)
    third.join_epoch = None
    serving_harness.hello(hello)
    assert third.join_epoch.rank == 2
    assert third.join_epoch.rendezvous_address == first.hello.rendezvous_address


@pytest.mark.parametrize("what", ["epoch", "generation"])
def test_one_message_cannot_use_up_the_numbers_of_a_pool(serving_harness, what):
    worker = serving_harness.ranks[0]
    serving_harness.lose(worker)
    hello = worker.reconnecting()
    running = hello.running
    changed = (
        replace(running, epoch=2**53)
        if what == "epoch"
        else replace(running, staged_generation=2**53)
    )
    with pytest.raises(RejectedWorkerError, match=f"{what} {2**53}"):
        serving_harness.hello(replace(hello, running=changed))
    serving_harness.hello(hello)
    assert serving_harness.pool.roster.complete

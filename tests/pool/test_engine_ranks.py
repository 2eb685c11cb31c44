"""Ranks inside another project's engine: their group is kept, and replicas share evenly."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from equipoise.balancer.service.status import pool_status
from equipoise.balancer.telemetry.pool_metrics import PoolMetrics
from equipoise.cli.live.view import pool_view
from equipoise.planning.moves import checksums_digest
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.pool.effects import WriteAudit
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.requests import AdminRequest, Rebalance
from equipoise_api.v1 import status_pb2 as pb
from tests.support.scripted_worker import MODEL, expert_table

ENGINE = "vLLM 0.33.0"


@pytest.fixture
def engine_bench(make_harness, policy):
    """Ranks of an engine, which formed their group before they connect."""
    others, harness = (
        make_harness(),
        make_harness(
            policy=dataclasses.replace(
                policy,
                weighted=Weighting.ON,
                algorithm=Algorithm.INCREMENTAL,
                min_gain=0.001,
            )
        ),
    )
    others.serve()
    harness.workers = others.workers
    for worker in harness.ranks:
        worker.hello = dataclasses.replace(
            worker.hello, engine=ENGINE, max_replicas=1023, weights_version=1
        )
        harness.hello(worker.reconnecting())
    return harness


def test_no_uneven_share_is_planned(engine_bench, skewed):
    engine_bench.run_traffic(skewed(1), seconds=40)
    assert any(one.accepted for one in engine_bench.decisions())
    assert engine_bench.pool.layouts.current.share_of_slot is None


@pytest.mark.parametrize(
    ("slots_per_rank", "room", "is_taken"),
    [(10, 3, False), (10, 4, True), (10, 0, True), (8, 1, True), (9, 3, False)],
)
def test_an_engine_without_room_for_every_layouts_replicas_is_rejected(
    make_harness, slots_per_rank, room, is_taken
):
    """Four ranks, 32 experts: an expert has at most a replica on each, and no more than fit."""
    harness = make_harness()
    worker = next(iter(harness.workers.values()))
    hello = dataclasses.replace(
        worker.hello, engine=ENGINE, slots_per_rank=slots_per_rank, max_replicas=room
    )
    assert (hello.num_ranks, hello.model.num_experts) == (4, 32)
    if is_taken:
        harness.hello(hello)
        return
    with pytest.raises(RejectedWorkerError, match=f"at most {room - 1} redundant") as caught:
        harness.hello(hello)
    assert caught.value.kind == "hello_replicas"


def test_a_lost_rank_is_reported_and_the_epoch_kept(engine_bench):
    harness = engine_bench
    epoch = harness.pool.roster.epoch
    gone = harness.ranks[1]
    harness.lose(gone)
    for _ in range(120):
        for worker in harness.ranks:
            if worker is not gone:
                harness.say(worker, worker.heartbeat())
        harness.tick(1.0)
    status = pool_status(harness.pool, now=harness.now)
    assert status.epoch == epoch
    assert gone.hello.worker in harness.pool.membership.opening.reason
    assert "keep their group" in harness.pool.membership.opening.reason
    assert {rank.engine for rank in status.ranks} == {ENGINE}


def test_our_worker_is_not_mixed_with_an_engines_ranks(engine_bench, hello_of, worker_of):
    stray = hello_of("stray", num_ranks=len(engine_bench.ranks))
    engine_bench.workers["stray"] = worker_of(stray)
    engine_bench.hello(stray)
    engine_bench.tick(1.0)
    assert "its engine is Equipoise's worker" in engine_bench.pool.quarantine.reasons["stray"]
    assert engine_bench.pool.roster.complete


def test_a_second_engine_in_a_pool_is_told_to_have_one_of_its_own(engine_bench):
    names = tuple(f"other-{rank}" for rank in range(4))
    for worker, name in zip(engine_bench.ranks, names, strict=True):
        hello = worker.reconnecting()
        running = dataclasses.replace(hello.running, epoch=hello.running.epoch + 1, workers=names)
        engine_bench.hello(dataclasses.replace(hello, worker=name, boot_id=name, running=running))
    engine_bench.tick(1.0)
    members = engine_bench.pool.roster.members
    assert all("give its engine a pool of its own" in members[name].left_out for name in names)
    assert engine_bench.pool.roster.complete


def beat(harness, **changes):
    """All ranks send a heartbeat that says this."""
    for worker in harness.ranks:
        harness.say(worker, dataclasses.replace(worker.heartbeat(), **changes))


def test_a_silent_rank_pauses_planning_by_name_and_keeps_its_rank(engine_bench, skewed):
    harness, silent = engine_bench, engine_bench.ranks[1]
    harness.run_traffic(skewed(1), seconds=20)
    epoch, decided = harness.pool.roster.epoch, len(harness.decisions())
    for _ in range(90):
        for worker in harness.ranks:
            if worker is not silent:
                worker.serve_traffic(skewed(2))
                harness.say(worker, worker.report())
        harness.tick(1.0)
        harness.carry_out_rollout()
    status = pool_status(harness.pool, now=harness.now)
    assert status.epoch == epoch
    assert "rank 1 has been silent for" in status.health_reason
    assert not any(one.accepted for one in harness.decisions()[decided:])
    assert not harness.pool.attendance.excluded


def test_nothing_is_staged_while_the_engine_takes_no_passes(engine_bench, skewed):
    harness = engine_bench
    harness.run_traffic(skewed(1), seconds=5)
    for _ in range(12):
        beat(harness, idle=True)
        harness.run_traffic(skewed(1) * 0, seconds=1)
    (decision,) = [one for one in harness.decisions() if "idle" in one.reason]
    assert not decision.accepted
    assert "rank 0 (worker-0) takes no forward passes" in decision.reason
    assert not any(worker.staged for worker in harness.ranks)
    status = pool_status(harness.pool, now=harness.now)
    assert [rank.idle for rank in status.ranks] == [True] * 4
    assert status.health == pb.POOL_HEALTH_SERVING
    beat(harness, idle=False)
    harness.run_traffic(skewed(1), seconds=20)
    assert any(one.accepted for one in harness.decisions())


def test_a_rollout_to_an_engine_that_falls_idle_is_aborted_without_backoff(engine_bench, skewed):
    harness = engine_bench
    harness.run_traffic(skewed(1), seconds=20, carry_out=False)
    harness.stage_all()
    for _ in range(40):
        beat(harness, idle=True)
        harness.tick(1.0)
    assert harness.pool.rollouts.aborted == 1
    assert harness.decisions()[-1].reason.endswith(
        "the engine is idle: rank 0 (worker-0) takes no forward passes"
    )
    assert harness.pool.rollouts.must_wait(now=harness.now) is None


def test_an_operator_is_told_that_an_idle_engine_cannot_switch(engine_bench, skewed):
    harness = engine_bench
    harness.run_traffic(skewed(1), seconds=20)
    beat(harness, idle=True)
    harness.perform(
        harness.controller.administer(
            AdminRequest(
                ticket=1, who="ops", reason="", what="rebalance", operation=Rebalance(force=True)
            ),
            now=harness.now,
        )
    )
    (audit,) = [write.record for write in harness.writes if isinstance(write, WriteAudit)]
    assert "the engine is idle" in audit.outcome


def test_updated_weights_pause_planning_by_name_until_all_ranks_hashed_them(engine_bench, skewed):
    harness = engine_bench
    harness.run_traffic(skewed(1), seconds=30)
    updated = harness.ranks[2]
    harness.say(updated, dataclasses.replace(updated.heartbeat(), weights_version=2))
    status = pool_status(harness.pool, now=harness.now)
    assert f"rank 2 ({updated.hello.worker}) has new weights (version 2)" in status.health_reason
    assert status.ranks[2].weights_version == 2
    decided = len(harness.decisions())
    for _ in range(30):
        harness.say(updated, dataclasses.replace(updated.heartbeat(), weights_version=2))
        harness.run_traffic(skewed(2), seconds=1)
    assert not any(one.kind == "plan" for one in harness.decisions()[decided:])

    first = harness.pool.layouts.current
    table = expert_table(MODEL) ^ 1
    for worker in harness.ranks:  # One after the other, in a new epoch.
        before = worker.reconnecting()
        assert before.running is not None
        sums = table[np.arange(3)[:, None], worker.own(worker.layout.expert_of_slot)]
        running = dataclasses.replace(
            before.running,
            epoch=before.running.epoch + 1000,
            layout=first.with_placement(first.expert_of_slot, generation=first.generation + 1000),
            checksums=sums,
            expert_checksums=table if worker.rank == 0 else None,
        )
        worker.hello = dataclasses.replace(
            worker.hello,
            experts_digest=checksums_digest(table),
            checkpoint_fingerprint=checksums_digest(table).hex(),
            weights_version=2,
        )
        harness.lose(worker, reason="it opens another stream")
        harness.hello(dataclasses.replace(worker.hello, running=running))
        harness.tick(0.1)
    beat(harness, weights_version=2)
    status = pool_status(harness.pool, now=harness.now)
    assert (status.health, status.health_reason) == (pb.POOL_HEALTH_SERVING, "")
    assert status.generation == first.generation + 1000
    assert harness.pool.agreement.is_settled
    assert not harness.pool.quarantine.workers


def test_what_an_engine_can_do_is_shown(engine_bench):
    harness = engine_bench
    status = pool_status(harness.pool, now=harness.now)
    assert {(one.max_replicas, one.weights_version) for one in status.ranks} == {(1023, 1)}
    metrics = PoolMetrics(now=harness.now)
    metrics.add(harness.pool)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.families()
        for sample in family.samples
    }
    assert samples["equipoise_engine_info", "tiny", ENGINE] == 1
    assert samples["equipoise_idle_ranks", "tiny"] == 0
    told = Console(width=200, record=True)
    told.print(pool_view(status))
    assert "replicas share their expert's load evenly, at most 1023 per expert" in " ".join(
        told.export_text().split()
    )

"""Ranks inside another project's engine: their group is kept, and replicas share evenly."""

import dataclasses

import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.pool.hello_checks import RejectedWorkerError

ENGINE = "vLLM 0.33.0"


@pytest.fixture
def engine_bench(make_harness, policy):
    """Ranks that serve, and say from then on that they are part of an engine."""
    harness = make_harness(
        policy=dataclasses.replace(
            policy,
            weighted=Weighting.ON,
            algorithm=Algorithm.INCREMENTAL,
            target_balancedness=1.0,
            min_gain=0.001,
        )
    )
    harness.serve()
    for worker in harness.ranks:
        worker.hello = dataclasses.replace(worker.hello, engine=ENGINE)
        harness.lose(worker)
    for worker in harness.ranks:
        harness.hello(worker.reconnecting())
    return harness


def test_no_uneven_share_is_planned(engine_bench, skewed):
    engine_bench.run_traffic(skewed(1), seconds=40)
    assert any(one.accepted for one in engine_bench.decisions())
    assert engine_bench.pool.layouts.current.share_of_slot is None


def test_a_lost_rank_is_reported_and_the_epoch_kept(engine_bench):
    harness = engine_bench
    epoch = pool_status(harness.pool, now=harness.now).epoch
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


def test_our_worker_is_not_mixed_with_an_engines_ranks(engine_bench, hello_of):
    stray = hello_of("stray", num_ranks=len(engine_bench.ranks))
    with pytest.raises(RejectedWorkerError, match="its engine is Equipoise's worker"):
        engine_bench.controller.hello(stray, now=engine_bench.now)

"""A pool whose replicas serve unequal shares: planned, rolled out, measured, and changed alone."""

import dataclasses

import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.planning.policy import Algorithm, Weighting


@pytest.fixture
def weighted_bench(make_harness, policy):
    weighted = dataclasses.replace(
        policy,
        weighted=Weighting.ON,
        algorithm=Algorithm.INCREMENTAL,
        min_gain=0.001,
        shift_factor=1000,
    )
    harness = make_harness(policy=weighted)
    harness.serve()
    return harness


def test_shares_are_rolled_out_and_the_realised_ones_are_reported(weighted_bench, skewed):
    harness = weighted_bench
    harness.run_traffic(skewed(1), seconds=20)
    layout = harness.pool.layouts.current
    assert layout.share_of_slot is not None
    assert all(worker.layout.same_placement(layout) for worker in harness.ranks)
    harness.run_traffic(skewed(1), seconds=10)
    shares = pool_status(harness.pool, now=harness.now).shares
    assert shares.generation == harness.pool.layouts.current.generation
    assert shares.uneven_layers > 0
    # Scripted ranks round what each slot gets in a second.
    assert shares.realised == pytest.approx(shares.planned, abs=0.03)
    assert shares.misplaced < 0.02


def test_workers_that_ignore_shares_are_found_out(weighted_bench, skewed):
    harness = weighted_bench
    harness.run_traffic(skewed(1), seconds=20)
    for worker in harness.ranks:
        worker.is_lopsided = True
    harness.run_traffic(skewed(1), seconds=20)
    assert pool_status(harness.pool, now=harness.now).shares.misplaced > 0.05


def test_a_small_drift_is_followed_without_a_copy(weighted_bench, skewed):
    harness = weighted_bench
    load = skewed(1)
    harness.run_traffic(load, seconds=20)
    before, decided = harness.pool.layouts.current, len(harness.decisions())
    drifted = load.copy()
    drifted[:, ::2] *= 1.1
    harness.run_traffic(drifted, seconds=60)
    rolled_out = [one for one in harness.decisions()[decided:] if one.accepted]
    assert any(one.moves == 0 and "other shares" in one.reason for one in rolled_out)
    assert not harness.pool.layouts.current.same_placement(before)

"""The status shows the pool's state."""

import numpy as np
import pytest

from equipoise.balancer.service.status import (
    decision_to_proto,
    loads_response,
    pool_status,
    pool_summary,
)
from equipoise.cli.live.view import status_line
from equipoise.pool.records import DecisionRecord
from equipoise.wire.plain import as_json
from equipoise_api.v1 import status_pb2 as pb


def test_a_pool_that_waits_says_for_whom(harness):
    harness.hello(harness.workers["worker-0"].hello)
    status = pool_status(harness.pool, now=harness.now)
    assert status.health == pb.POOL_HEALTH_WAITING
    assert "1 of 4 workers are connected (worker-0): waiting for 3 more" in status.health_reason
    assert list(status.ranks) == []
    assert loads_response(harness.pool) is None
    summary = pool_summary(harness.pool)
    assert (summary.ranks_serving, summary.num_ranks) == (0, 4)


def test_ranks_show_what_they_reported(serving_harness, skewed):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    harness.now += 2.0
    ranks = pool_status(harness.pool, now=harness.now).ranks
    assert [rank.worker for rank in ranks] == ["worker-0", "worker-2", "worker-1", "worker-3"]
    assert [rank.node for rank in ranks] == ["node-0", "node-0", "node-1", "node-1"]
    first = ranks[0]
    assert first.silent_s == pytest.approx(2.0)
    assert (first.tokens_processed, first.tokens_generated, first.median_step_us) == (7, 5, 900)
    assert (first.active_requests, first.queued_requests) == (3, 1)
    assert (first.device, first.kernels) == ("cuda:0 (NVIDIA H200)", "triton, gemm_large=deep_gemm")
    assert (first.cache_token_bytes, first.steps) == (70_272, "captured; rows by deep_ep")
    measured = harness.pool.windows.closed[-1].rank_load.sum(axis=0)
    shares = [rank.load_share for rank in ranks]
    assert shares == pytest.approx(list(measured / measured.sum()))


def test_a_rollout_is_shown_while_it_is_under_way(serving_harness, skewed):
    harness = serving_harness
    assert not pool_status(harness.pool, now=harness.now).HasField("rollout")
    harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    harness.say(harness.ranks[2], harness.ranks[2].answer_staged())
    harness.now += 3.0
    rollout = pool_status(harness.pool, now=harness.now).rollout
    moves = sum(len(worker.staged.moves) for worker in harness.ranks)
    assert (rollout.generation, rollout.state, rollout.moves) == (2, "staging", moves)
    assert rollout.bytes == 1000 * moves
    assert list(rollout.staged_ranks) == [2]
    assert rollout.state_age_s == pytest.approx(3.0)
    harness.carry_out_rollout()
    status = pool_status(harness.pool, now=harness.now)
    assert not status.HasField("rollout")
    assert status.generation == 2
    assert status.rollouts_completed == 1
    (switch,) = status.switches
    assert (switch.generation, switch.moves, switch.staging_s) == (2, moves, pytest.approx(3.0))


def test_windows_are_listed_oldest_first_with_the_generation_they_closed_in(
    serving_harness, skewed
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=30)
    status = pool_status(harness.pool, now=harness.now)
    assert [window.window for window in status.windows] == [1, 2, 3]
    assert [window.generation for window in status.windows] == [1, 2, 2]
    assert status.windows_closed == 3
    assert status.balancedness == status.windows[-1].balancedness
    assert status.balancedness_min_layer <= status.balancedness
    assert status.window_assignments == pytest.approx(3 * 10 * 10_000, rel=0.01)


def test_a_window_without_traffic_measures_nothing(serving_harness, skewed):
    harness = serving_harness
    before = as_json(pool_status(harness.pool, now=harness.now))
    assert before["balancedness"] is None
    harness.run_traffic(skewed(1) * 0, seconds=10)
    idle = pool_status(harness.pool, now=harness.now)
    assert idle.windows_closed == 1
    shown = as_json(idle)
    assert shown["balancedness"] is shown["balancedness_min_layer"] is None
    assert shown["windows"][0]["balancedness"] is None
    assert [rank["load_share"] for rank in shown["ranks"]] == [None] * 4
    assert as_json(pool_summary(harness.pool))["balancedness"] is None
    assert "balancedness no data" in status_line(idle)
    assert "1.000" not in status_line(idle)


def test_a_layer_without_traffic_counts_in_no_measure(serving_harness, skewed):
    load = skewed(1)
    load[1:] = 0
    serving_harness.run_traffic(load, seconds=10)
    status = pool_status(serving_harness.pool, now=serving_harness.now)
    assert status.windows[0].max_over_mean == pytest.approx(1 / status.windows[0].balancedness)


def test_a_decision_without_traffic_or_plan_has_no_balancedness():
    idle = DecisionRecord(
        time_unix_s=1.0, accepted=True, reason="r", base_generation=1, algorithm="rollback", moves=7
    )
    shown = as_json(decision_to_proto(idle))
    assert shown["moves"] == 7
    assert {shown[f"balancedness_{one}"] for one in ("current", "proposed", "realised")} == {None}


def test_gone_and_silent_ranks_are_distinguished(serving_harness):
    harness = serving_harness
    harness.lose(harness.ranks[0])
    for worker in harness.ranks[2:]:
        harness.now += 3.0
        harness.say(worker, worker.heartbeat())
    harness.tick()
    states = [rank.state for rank in pool_status(harness.pool, now=harness.now).ranks]
    assert states == ["gone", "silent", "connected", "connected"]
    assert pool_summary(harness.pool).ranks_serving == 2


def test_the_revision_grows_with_every_change(serving_harness):
    harness = serving_harness
    before = pool_status(harness.pool, now=harness.now).revision
    assert pool_status(harness.pool, now=harness.now).revision == before
    harness.say(harness.ranks[0], harness.ranks[0].report())
    assert pool_status(harness.pool, now=harness.now).revision > before


def test_loads_show_what_each_rank_received_in_each_layer(serving_harness, skewed):
    harness = serving_harness
    assert not loads_response(harness.pool).window_rank_assignments
    harness.run_traffic(skewed(1), seconds=10)
    loads, window = loads_response(harness.pool), harness.pool.windows.closed[-1]
    assert loads.slow_samples == pytest.approx(window.assignments / loads.num_layers, rel=0.01)
    table = np.frombuffer(loads.window_rank_assignments, dtype="<f8").reshape(
        loads.num_layers, loads.num_ranks
    )
    assert np.array_equal(table, window.rank_load)
    assert loads.window_generation == window.generation
    assert table.sum() == pytest.approx(window.load.sum(), rel=0.01)

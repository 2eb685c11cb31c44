"""A store that accepts no writes: what continues, by policy, and that nothing is ever switched."""

import pytest

from equipoise.planning.policy import Policy
from equipoise.pool.health import Health

FAULT = "redis://store: no answer within 2 s"


@pytest.fixture
def bench_of(make_harness):
    def harness(store_down):
        made = make_harness(
            policy=Policy(interval_s=10.0, min_assignments=100.0, store_down=store_down)
        )
        made.serve()
        return made

    return harness


@pytest.mark.parametrize(
    ("store_down", "words"), [("pause", "planning is paused"), ("memory", "continues in memory")]
)
def test_nothing_is_switched_and_health_gives_the_reason(bench_of, skewed, store_down, words):
    harness = bench_of(store_down)
    generation = harness.pool.layouts.current.generation
    harness.store_fault = FAULT
    harness.run_traffic(skewed(1), seconds=40)
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert FAULT in diagnosis.reason
    assert words in diagnosis.reason
    assert harness.pool.layouts.current.generation == generation
    assert all(worker.staged is None for worker in harness.ranks)


def test_a_paused_pool_gives_no_verdicts(bench_of, skewed):
    harness = bench_of("pause")
    harness.store_fault = FAULT
    harness.run_traffic(skewed(1), seconds=40)
    harness.store_fault = ""
    harness.tick()
    assert harness.decisions() == []


def test_verdicts_given_in_memory_are_shown_and_written_later(bench_of, skewed):
    harness = bench_of("memory")
    harness.store_fault = FAULT
    # The first plan is in progress before the fault shows, and times out after 30 s.
    harness.run_traffic(skewed(1), seconds=60)
    shown = harness.pool.journal.last_decision
    assert "the rollout waits for the store" in shown.reason
    assert not shown.accepted
    harness.store_fault = ""
    harness.run_traffic(skewed(1), seconds=20)
    written = harness.decisions()
    assert shown in written
    assert any(one.accepted for one in written), "the plan is rolled out at last"
    assert harness.pool.layouts.stored_generation > 1


def test_averages_continue_in_memory(bench_of, skewed):
    harness = bench_of("pause")
    harness.store_fault = FAULT
    harness.run_traffic(skewed(1), seconds=40)
    assert harness.pool.windows.loads.slow.per_second().sum() == pytest.approx(
        skewed(1).round().sum(), rel=0.05
    )

"""Ranks switch to a wave's layout after the balancer has aborted it and begun another one."""

import pytest

from equipoise.pool.health import Health
from equipoise.wire.errors import InvalidMessageError

SILENCE_S = 7
WINDOW_S = 10
SILENT = 3


@pytest.fixture
def aborted(serving_harness, skewed):
    """A wave that all ranks have staged, which one could not report in time; no Abort arrived."""
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=WINDOW_S + 2, carry_out=False)
    stages = [worker.staged for worker in harness.ranks]
    for worker in harness.ranks[:SILENT]:
        harness.say(worker, worker.answer_staged())
    for _ in range(SILENCE_S):
        harness.now += 1.0
        for worker in harness.ranks[:SILENT]:
            harness.say(worker, worker.heartbeat())
        harness.tick()
    assert harness.pool.rollouts.current is None
    for worker, stage in zip(harness.ranks, stages, strict=True):
        worker.staged = stage
    return harness


def beat(harness):
    """Every rank reports what it runs; a stream that ends for it begins again."""
    for worker in harness.ranks:
        try:
            harness.say(worker, worker.heartbeat())
        except InvalidMessageError:
            harness.lose(worker)
            harness.hello(worker.reconnecting())


@pytest.mark.parametrize("begins_another", [False, True], ids=["alone", "beside another wave"])
def test_what_all_ranks_switched_to_is_adopted(aborted, skewed, begins_another):
    harness, stages = aborted, [worker.staged for worker in aborted.ranks]
    if begins_another:
        harness.say(harness.ranks[SILENT], harness.ranks[SILENT].heartbeat())
        harness.run_traffic(skewed(2), seconds=3 * WINDOW_S, carry_out=False)
        assert harness.pool.rollouts.current is not None
        assert harness.ranks[0].staged.layout.generation > stages[0].layout.generation
    for worker, stage in zip(harness.ranks, stages, strict=True):
        worker.run(stage.layout)
    for _ in range(30):
        harness.now += 1.0
        beat(harness)
        harness.tick()
    assert harness.pool.diagnosis().health is Health.SERVING
    assert harness.pool.layouts.current.generation == stages[0].layout.generation
    assert harness.pool.layouts.committed.same_placement(stages[0].layout)
    harness.run_traffic(skewed(3), seconds=3 * WINDOW_S)
    assert harness.ranks[0].layout.generation > stages[0].layout.generation

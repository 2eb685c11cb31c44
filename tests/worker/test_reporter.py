"""What a rank reports about its load."""

from dataclasses import replace

import numpy as np

from equipoise.planning.phase import Phase
from equipoise.rank.engine import EngineProgress
from equipoise.rank.reporter import FINAL_REPORTS, Reporter
from equipoise.rank.waits import Waits
from equipoise.wire.messages import RankStats, Wait, WorkerTimeout
from equipoise_model.dispatch import SlotLoad
from tests.support.worker_parts import join_epoch_of

STATS = RankStats(
    steps=1,
    tokens_processed=2,
    tokens_generated=1,
    median_step_us=5,
    active_requests=0,
    queued_requests=0,
)


def reporter(phase=Phase.MIXED):
    return Reporter(
        join_epoch_of(epoch=4, rank=2),
        engine=None,
        boot_id="b",
        phase=phase,
        send=print,
        waits=Waits({Wait.STEP: 4.0}),
    )


def progress(*generations):
    return EngineProgress(
        loads=tuple(
            SlotLoad(generation=generation, slot_load_LS=np.full((2, 3), generation))
            for generation in generations
        ),
        stats=STATS,
    )


def generations_of(reports):
    return [report.load.generation for report in reports]


def test_a_report_names_its_boot_rank_and_generation():
    [report] = reporter().build(progress(7))
    assert report.stats == replace(STATS, timeouts=(WorkerTimeout(name="step", timeout_s=4.0),))
    load = report.load
    assert (load.boot_id, load.epoch, load.rank, load.generation) == ("b", 4, 2, 7)
    assert load.phase is Phase.MIXED
    assert load.assignments.dtype == np.uint64
    np.testing.assert_array_equal(load.assignments, np.full((2, 3), 7))


def test_a_report_names_the_phase_of_its_pool():
    [report] = reporter(Phase.PREFILL).build(progress(7))
    assert report.load.phase is Phase.PREFILL


def test_final_counters_are_sent_a_few_times_after_the_current_ones():
    """A window may close between them, and the first of them tells the steps."""
    one = reporter()
    assert generations_of(one.build(progress(1))) == [1]
    for _ in range(FINAL_REPORTS):
        assert generations_of(one.build(progress(2, 1))) == [2, 1]
    assert generations_of(one.build(progress(2, 1))) == [2]
    assert generations_of(one.build(progress(3, 2))) == [3, 2]


def test_each_ended_generation_is_sent_a_few_times():
    """A restarted balancer knows the layout of the latest one only."""
    one = reporter()
    for _ in range(FINAL_REPORTS - 1):
        one.build(progress(2, 1))
    assert generations_of(one.build(progress(3, 2, 1))) == [3, 2, 1]
    assert generations_of(one.build(progress(3, 2, 1))) == [3, 2]


def test_final_counters_that_still_change_are_sent_again():
    """An engine adds up its last passes some passes after the switch."""
    one = reporter()
    for _ in range(FINAL_REPORTS + 1):
        reports = one.build(progress(2, 1))
    assert generations_of(reports) == [2]
    late = progress(2, 1)
    late.loads[1].slot_load_LS[0, 0] += 5
    for _ in range(FINAL_REPORTS):
        _, final = one.build(late)
        assert final.load.assignments[0, 0] == 6
    assert generations_of(one.build(late)) == [2]

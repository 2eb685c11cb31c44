"""Reported steps and computing time: their windows, and the correction of wrong reports."""

import numpy as np
import pytest

from equipoise.planning.counters import LoadReport
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.phase import Phase
from equipoise.planning.steps import MAX_BUSY_RATIO, MAX_DELAY_S, MAX_STEPS_PER_S, StepCounters

FALSE_STEPS = 500_000
"""The most that are plausible."""


class Ranks:
    """Two ranks that step together and report each second; each step computes for 10 ms."""

    def __init__(self, *, steps=0, is_heard_from_start=True) -> None:
        self.counters = StepCounters(num_ranks=2, is_heard_from_start=is_heard_from_start)
        self.now, self.steps = 1000.0, steps

    def tell(self, rank, *, steps, busy_us=None, generation=1, has_grown=True):
        load = LoadReport(
            boot_id="boot",
            epoch=1,
            rank=rank,
            generation=generation,
            phase=Phase.MIXED,
            assignments=np.zeros((1, 1), dtype=np.uint64),
        )
        busy_us = steps * 10_000 if busy_us is None else busy_us
        self.counters.steps_since_report(rank, steps, busy_us=busy_us, now=self.now)
        self.counters.accept(load, steps=steps, busy_us=busy_us, has_grown=has_grown, now=self.now)

    def run(self, *, seconds=5, ranks=(0, 1), generation=1, has_grown=True):
        for _ in range(seconds):
            self.now += 1.0
            self.steps += 50
            for rank in ranks:
                self.tell(rank, steps=self.steps, generation=generation, has_grown=has_grown)

    def window(self):
        """Steps of rank 1 for each of rank 0, and computing time a step; the next one opens."""
        steps, pace = self.counters.in_window(), self.counters.pace(np.ones((1, 2)))
        self.counters.open_next()
        return float(steps[1] / steps[0]), None if pace is None else pace.busy_us.tolist()


HONEST = (1.0, [10_000.0, 10_000.0])


def test_a_rank_that_reported_later_has_more_steps_in_the_window():
    ranks = Ranks()
    ranks.run(seconds=1)
    ranks.run(seconds=2, ranks=(1,))
    assert ranks.window() == (3.0, [10_000.0, 10_000.0])


def test_ranks_are_not_compared_if_one_reported_no_steps():
    ranks = Ranks()
    ranks.run()
    ranks.window()
    ranks.run(ranks=(0,))
    assert ranks.window() == (0.0, None)


def test_steps_before_the_balancer_started_are_in_no_window():
    ranks = Ranks(steps=1_000_000, is_heard_from_start=False)
    ranks.run(seconds=1)
    ranks.tell(1, steps=ranks.steps + 50)
    ranks.run(seconds=2)
    assert ranks.window() == HONEST


@pytest.mark.parametrize(
    ("steps", "busy_us"),
    [(FALSE_STEPS, None), (3, None), (None, 100_000_000)],
    ids=["too many steps", "too few", "too much computing"],
)
def test_the_next_report_corrects_a_wrong_count(steps, busy_us):
    ranks = Ranks()
    ranks.run()
    ranks.tell(1, steps=ranks.steps if steps is None else steps, busy_us=busy_us or 7)
    ranks.run()
    assert ranks.window() == HONEST


def test_a_wrong_count_at_the_end_of_a_window_is_corrected_two_windows_later():
    ranks = Ranks()
    ranks.run()
    ranks.tell(1, steps=FALSE_STEPS, busy_us=7)
    ranks.window()
    ranks.run()
    ratio, pace = ranks.window()
    assert ratio < 0, "one cannot know how many steps it made"
    assert pace is None
    ranks.run()
    assert ranks.window() == HONEST


def test_a_wrong_count_is_corrected_in_the_next_generation_too():
    ranks = Ranks()
    ranks.run()
    ranks.tell(1, steps=FALSE_STEPS, busy_us=7)
    ranks.run(generation=2, has_grown=False)
    assert ranks.window() == HONEST


@pytest.mark.parametrize(
    ("generation", "has_grown"),
    [(2, False), (1, True), (1, False)],
    ids=["no new assignments", "of the generation before", "both"],
)
def test_a_late_report_corrects_nothing(generation, has_grown):
    ranks = Ranks()
    ranks.run(generation=2)
    ranks.tell(1, steps=20, generation=generation, has_grown=has_grown)
    assert ranks.window() == HONEST


def test_counts_that_rise_faster_than_time_are_rejected_and_named():
    ranks = Ranks()
    ranks.run(seconds=1)
    ranks.now += 10.0
    steps = round(MAX_STEPS_PER_S * (10.0 + MAX_DELAY_S))
    busy_us = round(MAX_BUSY_RATIO * (10.0 + MAX_DELAY_S) * 1e6)
    with pytest.raises(InvalidReportError, match="rank 1 reports 700001 steps in") as caught:
        ranks.tell(1, steps=ranks.steps + steps + 1, busy_us=0)
    assert caught.value.kind == "report_implausible"
    with pytest.raises(InvalidReportError, match="rank 1 reports 150 s of computing in"):
        ranks.tell(1, steps=ranks.steps, busy_us=busy_us + 10_000_000)
    ranks.tell(1, steps=ranks.steps + steps, busy_us=busy_us)


def test_a_rank_whose_reports_were_delayed_for_long_is_accepted_again():
    """They come at once then, and tell of more time than passed since the first of them."""
    ranks = Ranks()
    ranks.tell(0, steps=1, busy_us=0)
    busy_us, rejected = 300_000_000, 0
    for _ in range(100):
        ranks.now, busy_us = ranks.now + 10.0, busy_us + 10_000_000
        try:
            ranks.tell(0, steps=2, busy_us=busy_us)
        except InvalidReportError:
            rejected += 1
    assert 0 < rejected < 30


def test_a_window_tells_how_long_steps_took_and_compares_ranks():
    counters = StepCounters(num_ranks=3, is_heard_from_start=True)
    rank_load = np.array([[100.0, 200.0, 300.0], [300.0, 300.0, 600.0]])
    for rank, own in enumerate(rank_load.sum(axis=0)):
        load = LoadReport(
            boot_id="boot",
            epoch=1,
            rank=rank,
            generation=1,
            phase=Phase.MIXED,
            assignments=np.zeros((1, 1), dtype=np.uint64),
        )
        busy_us = 20 * 1000 + 3 * int(own)
        counters.accept(load, steps=20, busy_us=busy_us, step_us=20 * 5000, has_grown=True, now=1.0)
    window = counters.step_window(rank_load)
    assert window.step_s == pytest.approx(5e-3)
    assert window.max_rank_load == pytest.approx(900 / 20)
    assert window.mean_rank_load == pytest.approx(600 / 20)
    assert window.load_gap == pytest.approx(500 / 20)
    assert window.busy_gap_s == pytest.approx(3e-6 * 500 / 20)
    counters.open_next()
    assert counters.step_window(rank_load) is None


def test_ranks_that_report_no_step_times_have_no_step_window():
    ranks = Ranks()
    ranks.run()
    assert ranks.counters.step_window(np.ones((1, 2))) is None


def test_impossible_step_times_are_rejected():
    ranks = Ranks()
    ranks.run()
    with pytest.raises(InvalidReportError, match="s of steps in"):
        ranks.counters.steps_since_report(
            0, ranks.steps + 1, busy_us=0, step_us=10**12, now=ranks.now + 1.0
        )

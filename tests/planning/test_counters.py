"""Cumulative reports as differences: each assignment counts once, even if reports are lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.planning.counters import LoadCounters, LoadReport
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.layout import Layout
from equipoise.planning.phase import Phase

# Two layers, three experts, two ranks of two slots: rank 0 holds 0 and 1, rank 1 holds 2 and 0.
LAYOUT = Layout(
    generation=3,
    num_experts=3,
    num_ranks=2,
    expert_of_slot=np.array([[0, 1, 2, 0], [0, 1, 2, 0]], dtype=np.int32),
)


def report(assignments, *, rank=1, generation=3, epoch=5, boot_id="boot", phase=Phase.MIXED):
    return LoadReport(
        boot_id=boot_id,
        epoch=epoch,
        rank=rank,
        generation=generation,
        phase=phase,
        assignments=np.array(assignments, dtype=np.uint64),
    )


def rejected_kind(counters, late, layout=LAYOUT, num_steps=None):
    with pytest.raises(InvalidReportError) as rejected:
        counters.accept(late, layout, num_steps=num_steps)
    return rejected.value.kind


def test_own_slots_become_logical_experts():
    delta = LoadCounters(epoch=5).accept(report([[7, 2], [1, 4]]), LAYOUT)
    np.testing.assert_array_equal(delta.expert_load, [[2, 0, 7], [4, 0, 1]])
    np.testing.assert_array_equal(delta.slot_load.sum(axis=1), [9, 5])
    assert delta.rank == 1


def test_a_second_report_adds_the_difference():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]]), LAYOUT)
    delta = counters.accept(report([[7, 3], [2, 4]]), LAYOUT)
    np.testing.assert_array_equal(delta.expert_load, [[1, 0, 0], [0, 0, 1]])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_lost_repeated_and_late_reports_change_nothing_in_the_sum(steps, random):
    totals = np.cumsum(steps).tolist()
    arriving = [total for total in totals[:-1] for _ in range(random.randint(0, 2))]
    random.shuffle(arriving)
    counters, added = LoadCounters(epoch=5), 0.0
    for total in [*arriving, totals[-1]]:
        try:
            delta = counters.accept(report([[total, 0], [0, total]]), LAYOUT)
        except InvalidReportError as late:
            assert late.kind == "report_shrinking_counter"  # noqa: PT017 - lateness is the point
        else:
            added += delta.slot_load.sum(axis=1)[0]
    assert added == totals[-1]


def test_counters_of_another_boot_generation_or_phase_are_not_compared():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]]), LAYOUT)
    later = LAYOUT.with_placement(LAYOUT.expert_of_slot, generation=4)
    others = [
        (report([[1, 0], [0, 0]], boot_id="reboot"), LAYOUT),
        (report([[1, 0], [0, 0]], boot_id="reboot", phase=Phase.DECODE), LAYOUT),
        (report([[1, 0], [0, 0]], boot_id="reboot", generation=4), later),
    ]
    for other, layout in others:
        counted = counters.accept(other, layout).slot_load
        np.testing.assert_array_equal(counted, [[1, 0], [0, 0]])


def test_the_first_report_of_a_generation_that_began_earlier_is_only_a_baseline():
    counters = LoadCounters(epoch=5, counted_from=4)
    first = counters.accept(report([[1000, 2], [1, 4]]), LAYOUT)
    second = counters.accept(report([[1001, 2], [1, 4]]), LAYOUT)
    assert first.expert_load.sum() == 0
    assert second.expert_load.sum() == 1


def test_a_shrinking_counter_is_rejected_and_forgotten():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]]), LAYOUT)
    assert rejected_kind(counters, report([[9, 1], [1, 4]])) == "report_shrinking_counter"
    delta = counters.accept(report([[8, 2], [1, 4]]), LAYOUT)
    np.testing.assert_array_equal(delta.slot_load.sum(axis=1), [1, 0])


def test_a_lower_count_with_later_steps_corrects_an_earlier_report():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[1_000_000, 2], [1, 4]]), LAYOUT, num_steps=10)
    late = report([[6, 2], [1, 3]])
    assert rejected_kind(counters, late, num_steps=0) == "report_shrinking_counter"
    true = counters.accept(report([[9, 3], [1, 4]]), LAYOUT, num_steps=1)
    assert true.slot_load.sum() == 0
    delta = counters.accept(report([[10, 3], [1, 5]]), LAYOUT, num_steps=1)
    np.testing.assert_array_equal(delta.slot_load.sum(axis=1), [1, 1])


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (report([[1, 1], [1, 1]], epoch=4), "report_wrong_epoch"),
        (report([[1, 1], [1, 1]], rank=2), "report_unknown_rank"),
        (report([[1, 1], [1, 1]], rank=-1), "report_unknown_rank"),
        (report([[1, 1], [1, 1]], generation=4), "report_future_generation"),
        (report([[1, 1], [1, 1]], generation=2), "report_old_generation"),
        (report([[1, 1, 1], [1, 1, 1]]), "report_shape"),
        (report([[1, 1]]), "report_shape"),
    ],
)
def test_a_report_that_cannot_be_used_is_rejected_by_kind(wrong, kind):
    assert rejected_kind(LoadCounters(epoch=5), wrong) == kind


def test_a_stray_report_of_an_earlier_boot_does_not_count_twice():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]], boot_id="first"), LAYOUT)
    counters.accept(report([[0, 0], [0, 0]], boot_id="second"), LAYOUT)
    stray = report([[8, 2], [1, 4]], boot_id="first")
    assert rejected_kind(counters, stray) == "report_old_boot"


def test_only_a_few_generations_are_kept_and_a_dropped_one_does_not_count_twice():
    counters = LoadCounters(epoch=5)
    for generation in range(3, 40):
        layout = LAYOUT.with_placement(LAYOUT.expert_of_slot, generation=generation)
        counters.accept(report([[5, 5], [5, 5]], generation=generation), layout)
    assert len(counters._ranks[1].assignments) <= 4
    assert rejected_kind(counters, report([[5, 5], [5, 5]])) == "report_old_generation"

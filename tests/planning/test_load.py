import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.planning.errors import InvalidReportError
from equipoise.planning.layout import Layout
from equipoise.planning.load import (
    LoadAverage,
    LoadCounters,
    LoadReport,
    LoadWindow,
    Phase,
    detect_shift,
)

# Two layers, three experts, two ranks of two slots: rank 0 holds 0 and 1, rank 1 holds 2 and 0.
LAYOUT = Layout(
    generation=3,
    num_experts=3,
    num_ranks=2,
    expert_of_slot=np.array([[0, 1, 2, 0], [0, 1, 2, 0]], dtype=np.int32),
)


def report(tokens, *, rank=1, generation=3, epoch=5, boot_id="boot", phase=Phase.MIXED):
    return LoadReport(
        boot_id=boot_id,
        epoch=epoch,
        rank=rank,
        generation=generation,
        phase=phase,
        tokens=np.array(tokens, dtype=np.uint64),
    )


def refused_kind(counters, late, layout=LAYOUT, num_steps=None):
    with pytest.raises(InvalidReportError) as refused:
        counters.accept(late, layout, num_steps=num_steps)
    return refused.value.kind


def test_own_slots_become_logical_experts():
    delta = LoadCounters(epoch=5).accept(report([[7, 2], [1, 4]]), LAYOUT)
    np.testing.assert_array_equal(delta.tokens_of_expert, [[2, 0, 7], [4, 0, 1]])
    np.testing.assert_array_equal(delta.tokens_of_slot.sum(axis=1), [9, 5])
    assert delta.rank == 1


def test_a_second_report_adds_the_difference():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]]), LAYOUT)
    delta = counters.accept(report([[7, 3], [2, 4]]), LAYOUT)
    np.testing.assert_array_equal(delta.tokens_of_expert, [[1, 0, 0], [0, 0, 1]])


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
            added += delta.tokens_of_slot.sum(axis=1)[0]
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
        counted = counters.accept(other, layout).tokens_of_slot
        np.testing.assert_array_equal(counted, [[1, 0], [0, 0]])


def test_a_generation_that_began_unheard_gives_a_baseline_first():
    counters = LoadCounters(epoch=5, counted_from=4)
    first = counters.accept(report([[1000, 2], [1, 4]]), LAYOUT)
    second = counters.accept(report([[1001, 2], [1, 4]]), LAYOUT)
    assert first.tokens_of_expert.sum() == 0
    assert second.tokens_of_expert.sum() == 1


def test_a_shrinking_counter_is_refused_and_forgotten():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]]), LAYOUT)
    assert refused_kind(counters, report([[9, 1], [1, 4]])) == "report_shrinking_counter"
    delta = counters.accept(report([[8, 2], [1, 4]]), LAYOUT)
    np.testing.assert_array_equal(delta.tokens_of_slot.sum(axis=1), [1, 0])


def test_a_report_of_later_steps_is_believed_against_one_that_was_above_it():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[1_000_000, 2], [1, 4]]), LAYOUT, num_steps=10)
    late = report([[6, 2], [1, 3]])
    assert refused_kind(counters, late, num_steps=0) == "report_shrinking_counter"
    true = counters.accept(report([[9, 3], [1, 4]]), LAYOUT, num_steps=1)
    assert true.tokens_of_slot.sum() == 0
    delta = counters.accept(report([[10, 3], [1, 5]]), LAYOUT, num_steps=1)
    np.testing.assert_array_equal(delta.tokens_of_slot.sum(axis=1), [1, 1])


def test_layers_of_a_window_count_alike_or_it_is_a_contradiction():
    window = LoadWindow(num_layers=2, num_experts=4, num_ranks=2, opened_s=0.0)
    counters = LoadCounters(epoch=5)
    window.add(counters.accept(report([[500, 500], [300, 600]]), LAYOUT))
    assert window.close(now=1.0).contradiction == ""
    window.add(counters.accept(report([[600, 600], [400, 90_600]]), LAYOUT))
    window.add(counters.accept(report([[300, 500], [300, 600]], rank=0), LAYOUT))
    assert window.close(now=2.0).contradiction == (
        "layer 1 counted 91000 expert assignments, most of them on rank 1, where half of the "
        "layers have at most 1000"
    )


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
def test_a_report_that_cannot_be_used_is_refused_by_kind(wrong, kind):
    assert refused_kind(LoadCounters(epoch=5), wrong) == kind


def test_a_stray_report_of_an_earlier_boot_does_not_count_twice():
    counters = LoadCounters(epoch=5)
    counters.accept(report([[7, 2], [1, 4]], boot_id="first"), LAYOUT)
    counters.accept(report([[0, 0], [0, 0]], boot_id="second"), LAYOUT)
    stray = report([[8, 2], [1, 4]], boot_id="first")
    assert refused_kind(counters, stray) == "report_old_boot"


def test_only_a_few_generations_are_remembered_and_a_forgotten_one_does_not_count_twice():
    counters = LoadCounters(epoch=5)
    for generation in range(3, 40):
        layout = LAYOUT.with_placement(LAYOUT.expert_of_slot, generation=generation)
        counters.accept(report([[5, 5], [5, 5]], generation=generation), layout)
    assert len(counters._ranks[1].tokens) <= 4
    assert refused_kind(counters, report([[5, 5], [5, 5]])) == "report_old_generation"


def test_a_window_holds_what_came_since_the_last_close():
    counters = LoadCounters(epoch=5)
    window = LoadWindow(num_layers=2, num_experts=3, num_ranks=2, opened_s=10.0)
    window.add(counters.accept(report([[7, 2], [1, 4]], rank=0), LAYOUT))
    window.add(counters.accept(report([[1, 1], [0, 0]], rank=1), LAYOUT))
    closed = window.close(now=12.5)
    np.testing.assert_array_equal(closed.tokens_of_expert, [[8, 2, 1], [1, 4, 0]])
    np.testing.assert_array_equal(closed.tokens_of_rank, [[9, 2], [5, 0]])
    assert closed.duration_s == 2.5
    assert closed.tokens_per_layer == 8.0
    assert window.close(now=13.0).tokens_of_expert.sum() == 0
    assert closed.tokens_of_expert.sum() == 16


def average(half_life_s=10.0, now=0.0):
    return LoadAverage.start(num_layers=1, num_experts=2, half_life_s=half_life_s, now=now)


def test_a_steady_stream_has_its_exact_rate_even_when_young():
    young = average().fold(np.array([[3.0, 6.0]]), now=1.5)
    np.testing.assert_allclose(young.per_second(), [[2.0, 4.0]], rtol=1e-12)


def test_after_one_half_life_without_traffic_the_old_sum_weighs_half():
    busy = average().fold(np.array([[1.0, 0.0]]), now=1.0)
    idle = busy.fold(np.zeros((1, 2)), now=11.0)
    np.testing.assert_allclose(idle.decayed_tokens, busy.decayed_tokens / 2, rtol=1e-12)


@given(st.lists(st.floats(0.01, 20.0), min_size=1, max_size=20))
def test_how_time_is_cut_into_folds_does_not_matter(steps_s):
    cut, now = average(), 0.0
    for step_s in steps_s:
        now += step_s
        cut = cut.fold(np.array([[3.0, 1.0]]) * step_s, now=now)
    whole = average().fold(np.array([[3.0, 1.0]]) * now, now=now)
    np.testing.assert_allclose(cut.decayed_tokens, whole.decayed_tokens, rtol=1e-9)
    np.testing.assert_allclose(cut.per_second(), [[3.0, 1.0]], rtol=1e-9)


def test_a_long_past_is_forgotten():
    then = average().fold(np.array([[100.0, 0.0]]), now=10.0)
    later = then.fold(np.array([[0.0, 10_000.0]]), now=1010.0)
    np.testing.assert_allclose(later.per_second(), [[0.0, 10.0]], atol=1e-9)


def test_two_folds_at_one_time_add_up():
    once = average().fold(np.array([[4.0, 4.0]]), now=2.0)
    twice = once.fold(np.array([[1.0, 0.0]]), now=2.0)
    np.testing.assert_allclose(twice.decayed_tokens - once.decayed_tokens, [[1.0, 0.0]])
    assert math.isclose(twice.decayed_duration_s, once.decayed_duration_s)


def test_an_average_that_saw_no_time_is_zero():
    np.testing.assert_array_equal(average().per_second(), [[0.0, 0.0]])


def test_a_restarted_average_knows_the_given_tokens_only():
    old = average().fold(np.array([[1000.0, 0.0]]), now=100.0)
    fresh = old.restarted(np.array([[0.0, 20.0]]), duration_s=10.0, now=110.0)
    np.testing.assert_allclose(fresh.per_second(), [[0.0, 2.0]], rtol=1e-12)
    assert fresh.folded_s == 110.0


def alternating(num_folds):
    """Expert 0 brings 4 or 0 tokens a second in turn, expert 1 always 2."""
    folded = average(half_life_s=1e6)
    for index in range(num_folds):
        tokens = np.array([[4.0 * (index % 2), 2.0]]) * 0.5
        folded = folded.fold(tokens, now=0.5 * (index + 1))
    return folded


def test_the_variance_tells_a_load_that_comes_and_goes_from_a_steady_one():
    np.testing.assert_allclose(alternating(20).per_second(), [[2.0, 2.0]], rtol=1e-4)
    np.testing.assert_allclose(alternating(20).variance(), [[4.0, 0.0]], atol=1e-3)


def test_planning_for_risk_gives_room_to_what_varies():
    np.testing.assert_allclose(alternating(20).at_risk(1.5), [[5.0, 2.0]], atol=1e-2)
    np.testing.assert_array_equal(alternating(20).at_risk(0.0), alternating(20).per_second())


def test_an_average_that_saw_no_time_has_no_variance():
    np.testing.assert_array_equal(average().variance(), [[0.0, 0.0]])


def test_a_restart_forgets_the_variance_too():
    fresh = alternating(20).restarted(np.array([[4.0, 2.0]]), duration_s=1.0, now=11.0)
    np.testing.assert_allclose(fresh.variance(), [[0.0, 0.0]], atol=1e-12)


def test_a_store_without_squares_makes_the_load_count_as_steady_so_far():
    known = alternating(20)
    restored = dataclasses.replace(known, decayed_squares=None)
    np.testing.assert_allclose(restored.variance(), [[0.0, 0.0]], atol=1e-12)
    later = restored.fold(np.array([[12.0, 6.0]]), now=13.0)
    assert later.variance()[0, 0] > 0.0


def test_an_average_survives_the_store_and_another_clock():
    kept = average().fold(np.array([[3.0, 1.0]]), now=1.0)
    restored = LoadAverage(
        half_life_s=kept.half_life_s,
        folded_s=9000.0,
        decayed_tokens=np.frombuffer(kept.decayed_tokens.tobytes()).reshape(1, 2),
        decayed_duration_s=kept.decayed_duration_s,
    )
    after = restored.fold(np.array([[3.0, 1.0]]), now=9001.0)
    np.testing.assert_allclose(after.per_second(), [[3.0, 1.0]], rtol=1e-12)


@pytest.mark.parametrize("tokens", [50, 500, 50_000])
def test_sampling_noise_alone_is_never_a_shift(tokens):
    rng = np.random.default_rng(7)
    true_shares = rng.dirichlet(np.full(32, 0.5), size=4)
    slow = true_shares * 1e9
    for _ in range(200):
        sampled = np.array([rng.multinomial(tokens, row) for row in true_shares], dtype=float)
        shift = detect_shift(sampled, slow, tokens=tokens, threshold=0.05)
        assert not shift.detected, shift.reason


def test_the_noise_bound_is_above_the_mean_distance_of_samples():
    rng = np.random.default_rng(8)
    shares = rng.dirichlet(np.full(32, 0.5), size=1)
    drawn = [
        detect_shift(
            rng.multinomial(400, shares[0])[None, :].astype(float),
            shares * 1e9,
            tokens=400,
            threshold=0.1,
        )
        for _ in range(300)
    ]
    mean_distance = np.mean([shift.distance for shift in drawn])
    mean_noise = np.mean([shift.noise for shift in drawn])
    assert mean_distance < mean_noise < 2 * mean_distance


def test_traffic_that_goes_elsewhere_is_a_shift_and_the_reason_has_the_numbers():
    slow = np.array([[100.0, 100.0, 0.0, 0.0]])
    fast = np.array([[0.0, 0.0, 10.0, 10.0]])
    shift = detect_shift(fast, slow, tokens=10_000, threshold=0.15)
    assert shift.detected
    assert shift.distance == 1.0
    assert "100.0% of the tokens" in shift.reason


def test_few_tokens_are_no_witness_of_a_shift():
    slow = np.ones((1, 256))
    fast = np.zeros((1, 256))
    fast[0, :4] = 1.0
    assert not detect_shift(fast, slow, tokens=4, threshold=0.15).detected


@pytest.mark.parametrize(
    ("fast", "slow", "tokens"),
    [(np.zeros((1, 2)), np.ones((1, 2)), 10), (np.ones((1, 2)), np.ones((1, 2)), 0)],
)
def test_without_traffic_there_is_no_shift(fast, slow, tokens):
    shift = detect_shift(fast, slow, tokens=tokens, threshold=0.0)
    assert not shift.detected
    assert "no traffic" in shift.reason

"""Load windows, their averages, and shifts between these."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.planning.layout import Layout
from equipoise.planning.load import (
    LoadAverage,
    LoadDelta,
    LoadWindow,
    Shift,
    detect_shift,
    follow_traffic,
)


def make_window():
    return LoadWindow(num_layers=2, num_experts=3, num_ranks=2, opened_s=10.0)


def delta(load, *, rank, generation=1, experts=(0, 1, 2, 0)):
    """Of two ranks that hold experts 0 and 1, and 2 and 0."""
    layout = Layout(
        generation=generation,
        num_experts=3,
        num_ranks=2,
        expert_of_slot=np.tile(np.array(experts, dtype=np.int32), (2, 1)),
    )
    return LoadDelta(rank=rank, layout=layout, slot_load=np.array(load, dtype=np.float64))


def test_a_window_holds_the_load_since_the_last_close():
    window = make_window()
    window.add(delta([[7, 2], [1, 4]], rank=0))
    window.add(delta([[1, 1], [0, 0]], rank=1))
    closed = window.close(now=12.5)
    np.testing.assert_array_equal(closed.expert_load, [[8, 2, 1], [1, 4, 0]])
    np.testing.assert_array_equal(closed.rank_load, [[9, 2], [5, 0]])
    assert closed.duration_s == 2.5
    assert closed.assignments_per_layer == 8.0
    assert window.close(now=13.0).expert_load.sum() == 0
    assert closed.expert_load.sum() == 16


def test_a_window_counts_late_reports_by_the_layout_of_their_generation():
    window = make_window()
    window.add(delta([[7, 2], [1, 4]], rank=0))
    window.add(delta([[1, 1], [0, 0]], rank=1, generation=2, experts=(1, 0, 0, 2)))
    window.add(delta([[5, 0], [0, 0]], rank=1))
    closed = window.close(now=12.5)
    np.testing.assert_array_equal(closed.expert_load, [[8, 2, 6], [1, 4, 0]])
    np.testing.assert_array_equal(closed.rank_load, [[9, 7], [5, 0]])
    assert closed.layout is None
    window.add(delta([[1, 1], [0, 3]], rank=0, generation=2, experts=(1, 0, 0, 2)))
    window.add(delta([[0, 0], [0, 0]], rank=1))
    closed = window.close(now=13.5)
    assert closed.layout.generation == 2
    np.testing.assert_array_equal(closed.slot_load, [[1, 1, 0, 0], [0, 3, 0, 0]])
    np.testing.assert_array_equal(closed.expert_load, [[1, 1, 0], [3, 0, 0]])
    assert window.close(now=14.0).layout is None


def test_layers_of_a_window_that_count_differently_are_a_contradiction():
    window = make_window()
    window.add(delta([[500, 500], [300, 600]], rank=1))
    assert window.close(now=11.0).contradiction == ""
    window.add(delta([[100, 100], [100, 90_000]], rank=1))
    window.add(delta([[300, 500], [300, 600]], rank=0))
    assert window.close(now=12.0).contradiction == (
        "layer 1 counted 91000 assignments, most of them on rank 1, while half of the layers "
        "have at most 1000"
    )


def average(half_life_s=10.0, now=0.0):
    return LoadAverage.start(num_layers=1, num_experts=2, half_life_s=half_life_s, now=now)


def test_a_steady_stream_has_its_exact_rate_even_when_young():
    young = average().fold(np.array([[3.0, 6.0]]), now=1.5)
    np.testing.assert_allclose(young.per_second(), [[2.0, 4.0]], rtol=1e-12)


def test_after_one_half_life_without_traffic_the_old_sum_weighs_half():
    busy = average().fold(np.array([[1.0, 0.0]]), now=1.0)
    idle = busy.fold(np.zeros((1, 2)), now=11.0)
    np.testing.assert_allclose(idle.decayed_load, busy.decayed_load / 2, rtol=1e-12)


@given(st.lists(st.floats(0.01, 20.0), min_size=1, max_size=20))
def test_the_average_does_not_depend_on_how_time_is_cut_into_folds(steps_s):
    cut, now = average(), 0.0
    for step_s in steps_s:
        now += step_s
        cut = cut.fold(np.array([[3.0, 1.0]]) * step_s, now=now)
    whole = average().fold(np.array([[3.0, 1.0]]) * now, now=now)
    np.testing.assert_allclose(cut.decayed_load, whole.decayed_load, rtol=1e-9)
    np.testing.assert_allclose(cut.per_second(), [[3.0, 1.0]], rtol=1e-9)


@pytest.mark.parametrize(("num_seconds", "expected"), [(5, 5.0), (300, 2 * 10 / math.log(2))])
def test_an_average_is_as_precise_as_so_many_assignments(num_seconds, expected):
    """Each second brings one assignment, to one of two experts; every layer is a trial."""
    rng = np.random.default_rng(3)
    folded = LoadAverage.start(num_layers=4000, num_experts=2, half_life_s=10.0, now=0.0)
    for second, experts in enumerate(rng.integers(0, 2, size=(num_seconds, 4000))):
        folded = folded.fold(np.eye(2)[experts], now=second + 1.0)
    assert folded.samples() == pytest.approx(expected, rel=0.06)
    assert 0.25 / np.var(folded.per_second()[:, 0]) == pytest.approx(expected, rel=0.1)


def test_old_load_is_forgotten():
    then = average().fold(np.array([[100.0, 0.0]]), now=10.0)
    later = then.fold(np.array([[0.0, 10_000.0]]), now=1010.0)
    np.testing.assert_allclose(later.per_second(), [[0.0, 10.0]], atol=1e-9)


def test_two_folds_at_one_time_add_up():
    once = average().fold(np.array([[4.0, 4.0]]), now=2.0)
    twice = once.fold(np.array([[1.0, 0.0]]), now=2.0)
    np.testing.assert_allclose(twice.decayed_load - once.decayed_load, [[1.0, 0.0]])
    assert math.isclose(twice.decayed_duration_s, once.decayed_duration_s)


def test_an_average_that_saw_no_time_is_zero():
    np.testing.assert_array_equal(average().per_second(), [[0.0, 0.0]])


def test_a_restarted_average_has_only_the_given_load():
    old = average().fold(np.array([[1000.0, 0.0]]), now=100.0)
    fresh = old.restarted(np.array([[0.0, 20.0]]), duration_s=10.0, now=110.0)
    np.testing.assert_allclose(fresh.per_second(), [[0.0, 2.0]], rtol=1e-12)
    assert fresh.folded_s == 110.0


def alternating(num_folds):
    """Expert 0 brings 4 or 0 assignments a second in turn, expert 1 always 2."""
    folded = average(half_life_s=1e6)
    for index in range(num_folds):
        load = np.array([[4.0 * (index % 2), 2.0]]) * 0.5
        folded = folded.fold(load, now=0.5 * (index + 1))
    return folded


def test_the_variance_distinguishes_a_bursty_load_from_a_steady_one():
    np.testing.assert_allclose(alternating(20).per_second(), [[2.0, 2.0]], rtol=1e-4)
    np.testing.assert_allclose(alternating(20).variance(), [[4.0, 0.0]], atol=1e-3)


def test_planning_for_risk_leaves_room_for_variable_experts():
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
        decayed_load=np.frombuffer(kept.decayed_load.tobytes()).reshape(1, 2),
        decayed_duration_s=kept.decayed_duration_s,
    )
    after = restored.fold(np.array([[3.0, 1.0]]), now=9001.0)
    np.testing.assert_allclose(after.per_second(), [[3.0, 1.0]], rtol=1e-12)


@pytest.mark.parametrize("assignments", [50, 500, 50_000])
def test_sampling_noise_alone_is_never_a_shift(assignments):
    rng = np.random.default_rng(7)
    true_shares = rng.dirichlet(np.full(32, 0.5), size=4)
    slow = true_shares * 1e9
    for _ in range(200):
        sampled = np.array([rng.multinomial(assignments, row) for row in true_shares], dtype=float)
        shift = detect_shift(sampled, slow, assignments=assignments, factor=2.0)
        assert not shift.detected, shift.reason


def test_noise_in_a_layer_that_counts_fewer_is_no_shift_either():
    """The modules that draft tokens run for few requests only."""
    rng = np.random.default_rng(7)
    true_shares = rng.dirichlet(np.full(32, 0.5), size=4)
    counts = [2000, 2000, 2000, 20]
    for _ in range(200):
        sampled = np.array(
            [rng.multinomial(n, row) for n, row in zip(counts, true_shares, strict=True)],
            dtype=float,
        )
        mean = sum(counts) / len(counts)
        shift = detect_shift(sampled, true_shares * 1e9, assignments=mean, factor=2.0)
        assert not shift.detected, shift.reason


def test_the_noise_bound_is_above_the_mean_distance_of_samples():
    rng = np.random.default_rng(8)
    shares = rng.dirichlet(np.full(32, 0.5), size=1)
    drawn = [
        detect_shift(
            rng.multinomial(400, shares[0])[None, :].astype(float),
            shares * 1e9,
            assignments=400,
            factor=2.0,
        )
        for _ in range(300)
    ]
    mean_distance = np.mean([shift.distance for shift in drawn])
    mean_noise = np.mean([shift.noise for shift in drawn])
    assert mean_distance < mean_noise < 2 * mean_distance


def test_traffic_to_other_experts_is_a_shift_and_the_reason_has_the_numbers():
    slow = np.array([[100.0, 100.0, 0.0, 0.0]])
    fast = np.array([[0.0, 0.0, 10.0, 10.0]])
    shift = detect_shift(fast, slow, assignments=10_000, factor=2.0)
    assert shift.detected
    assert shift.distance == 1.0
    assert "100.0% of the load" in shift.reason


def test_too_few_assignments_are_not_a_shift():
    slow = np.ones((1, 256))
    fast = np.zeros((1, 256))
    fast[0, :4] = 1.0
    assert not detect_shift(fast, slow, assignments=4, factor=2.0).detected


@pytest.mark.parametrize(
    ("fast", "slow", "assignments"),
    [(np.zeros((1, 2)), np.ones((1, 2)), 10), (np.ones((1, 2)), np.ones((1, 2)), 0)],
)
def test_without_traffic_there_is_no_shift(fast, slow, assignments):
    shift = detect_shift(fast, slow, assignments=assignments, factor=2.0)
    assert not shift.detected
    assert "no traffic" in shift.reason


def followed(*shares, assignments=100_000, spread=None):
    """The slow average and the shifts after windows of 10 s with these shares.

    With a `spread`, the shares of each window vary like those of that many samples.
    """
    fast, slow = (
        LoadAverage.start(num_layers=4, num_experts=32, half_life_s=half_life_s, now=0.0)
        for half_life_s in (5.0, 60.0)
    )
    rng, before, found = np.random.default_rng(2), (), []
    for index, usual in enumerate(shares):
        drawn = np.array([rng.dirichlet(spread * row) for row in usual]) if spread else usual
        load = rng.multinomial(assignments, drawn).astype(np.float64)
        fast, slow, before, shift = follow_traffic(
            fast, slow, load, before=before, duration_s=10.0, factor=2.0, now=10.0 * (index + 1)
        )
        found.append(shift)
    return slow, found


def two_kinds(*, moved):
    """Shares of two kinds of traffic, between which some of the load moves to other experts."""
    one = np.random.default_rng(1).dirichlet(np.full(32, 2.0), size=4)
    return one, (1 - moved) * one + moved * np.roll(one, 7, axis=1)


def detections(shifts):
    return [index for index, shift in enumerate(shifts) if shift.detected]


def test_a_shift_that_many_assignments_prove_is_found_however_small():
    one, other = two_kinds(moved=0.1)
    slow, shifts = followed(*[one] * 8, *[other] * 4)
    assert detections(shifts) == [8]
    assert shifts[8].distance < 0.05
    rates = slow.per_second() / slow.per_second().sum(axis=1, keepdims=True)
    assert np.abs(rates - other).sum(axis=1).mean() < np.abs(rates - one).sum(axis=1).mean() / 3
    _, few = followed(*[one] * 8, *[other] * 4, assignments=2_000)
    assert not any(shift.detected for shift in few)


def test_traffic_that_shifts_in_every_window_is_averaged_instead():
    one, other = two_kinds(moved=0.5)
    slow, shifts = followed(*[one, other] * 8)
    assert detections(shifts) == [1, 2]
    assert "is usual in this pool" in shifts[5].reason
    rates = slow.per_second() / slow.per_second().sum(axis=1, keepdims=True)
    assert np.abs(rates - (one + other) / 2).sum(axis=1).mean() < 0.1


def test_traffic_that_varies_by_more_than_chance_is_no_shift_and_hides_none():
    """Requests are not independent samples, so real traffic varies by more than its counts."""
    one, other = two_kinds(moved=0.5)
    _, shifts = followed(*[one] * 20, *[other] * 4, assignments=10**7, spread=2_000)
    assert 5 * shifts[19].noise > shifts[20].distance > 2 * shifts[19].noise
    assert detections(shifts) == [1, 2, 20]


def test_a_window_without_traffic_changes_nothing_that_is_known_of_shifts():
    average = LoadAverage.start(num_layers=1, num_experts=2, half_life_s=60.0, now=0.0)
    known = (Shift(detected=True, distance=0.5, noise=0.1, reason=""),)
    made = follow_traffic(
        average, average, np.zeros((1, 2)), before=known, duration_s=1.0, factor=2.0, now=1.0
    )
    assert made.shifts == known
    assert not made.shift.detected

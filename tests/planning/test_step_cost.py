"""Step times of a synthetic fleet with known constants are taken apart."""

import dataclasses

import numpy as np
import pytest

from equipoise.planning.step_cost import (
    MAX_WINDOWS,
    MIN_WINDOWS,
    StepCostFit,
    StepWindow,
    compare_ranks,
)

FIXED_S, PER_ASSIGNMENT_S, PER_ROW_S = 6e-3, 2e-6, 2e-6
RANKS, TOP_K = 8, 8


def windows(seed, *, count=20, noise=0.01, outliers=3):
    """Traffic and imbalance vary; some windows have steps that stall."""
    rng = np.random.default_rng(seed)
    stalled = set(rng.choice(count, outliers, replace=False).tolist())
    for number in range(count):
        tokens = rng.uniform(200, 1200)
        rows = tokens * rng.uniform(3, 7)
        load = tokens * TOP_K * rng.uniform(1.05, 1.9) / RANKS * 4
        step_s = FIXED_S + PER_ASSIGNMENT_S * load + PER_ROW_S * rows
        step_s *= 1 + noise * rng.standard_normal()
        if number in stalled:
            step_s *= rng.uniform(1.5, 4)
        yield StepWindow(step_s=step_s, max_rank_load=load, mean_rank_load=rows)


def cost_of(found):
    fit = StepCostFit()
    for window in found:
        fit.add(window)
    return fit.cost()


@pytest.mark.parametrize("outliers", [0, 3])
def test_step_times_are_predicted_within_5_per_cent_after_20_windows(outliers):
    for seed in range(40):
        cost = cost_of(windows(seed, outliers=outliers))
        for window in windows(1000 + seed, noise=0, outliers=0):
            predicted = cost.step_s(
                max_rank_load=window.max_rank_load, mean_rank_load=window.mean_rank_load
            )
            assert predicted == pytest.approx(window.step_s, rel=0.05), seed


@pytest.mark.parametrize("outliers", [0, 3])
def test_the_constants_are_found_within_5_per_cent_after_20_windows(outliers):
    for seed in range(40):
        cost = cost_of(windows(seed, noise=0.003, outliers=outliers))
        assert cost.is_known
        assert cost.fixed_s == pytest.approx(FIXED_S, rel=0.05), seed
        assert cost.per_assignment_s == pytest.approx(PER_ASSIGNMENT_S, rel=0.05), seed
        assert cost.per_row_s == pytest.approx(PER_ROW_S, rel=0.05), seed


def test_errors_are_as_large_as_what_they_measure():
    """About 68 % of the constants are within one standard error; few are beyond three."""
    misses = []
    for seed in range(200):
        cost = cost_of(windows(seed, noise=0.02))
        misses.append((cost.per_assignment_s - PER_ASSIGNMENT_S) / cost.per_assignment_error_s)
    away = np.abs(misses)
    assert 0.45 < (away < 1).mean() < 0.85
    assert (away > 2).mean() < 0.1
    assert (away > 3).mean() < 0.03


@pytest.mark.parametrize(
    ("varies", "ratio", "noise"),
    [(0, 1.5, 0.01), (0, 1.5, 0), (1e-6, 1.5, 0.01), (0.5, 1.5, 0.01), (0.5, 1.0, 0.01)],
    ids=["constant", "not even noise", "nearly constant", "equally skewed", "one rank"],
)
def test_loads_that_do_not_tell_an_assignments_cost_leave_it_unknown(varies, ratio, noise):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(30):
        mean = 2e3 * (1 + varies * rng.uniform(-1, 1))
        load = mean * ratio * (1 + (varies == 1e-6) * 1e-6 * rng.uniform(-1, 1))
        step_s = FIXED_S + PER_ASSIGNMENT_S * load + PER_ROW_S * mean
        step_s *= 1 + noise * rng.standard_normal()
        found.append(StepWindow(step_s=step_s, max_rank_load=load, mean_rank_load=mean))
    cost = cost_of(found)
    assert not cost.is_known
    assert "loads have varied too little" in cost.reason


def test_a_window_that_hardly_differs_makes_no_cost_known():
    rng = np.random.default_rng(0)
    same = [
        StepWindow(
            step_s=0.02 * (1 + 0.01 * rng.standard_normal()), max_rank_load=3e3, mean_rank_load=5e3
        )
        for _ in range(30)
    ]
    assert cost_of(windows(3, outliers=0)).is_known
    cost = cost_of([*same, StepWindow(step_s=0.02, max_rank_load=3000.1, mean_rank_load=5e3)])
    assert not cost.is_known
    assert "loads have varied too little" in cost.reason


@pytest.mark.parametrize("times", [0.0, 1.0, 2.0])
def test_comparing_ranks_makes_the_cost_certain_only_if_it_agrees_with_step_times(times):
    rng = np.random.default_rng(1)
    compared = [
        dataclasses.replace(
            window,
            load_gap=1e3,
            busy_gap_s=times * PER_ASSIGNMENT_S * 1e3 * (1 + 0.01 * rng.standard_normal()),
        )
        for window in windows(1, count=30, outliers=0)
    ]
    cost = cost_of(compared)
    away = abs(cost.per_assignment_s - PER_ASSIGNMENT_S)
    assert away < 2 * cost.per_assignment_error_s
    assert (cost.per_assignment_error_s < 0.01 * PER_ASSIGNMENT_S) == (times == 1.0)


@pytest.mark.parametrize("before", [20, 40, MAX_WINDOWS])
def test_constants_that_change_are_found_after_8_windows(before):
    fit = StepCostFit()
    for window in windows(1, count=before):
        fit.add(window)
        fit.cost()
    for slower in windows(2, count=MIN_WINDOWS, outliers=0):
        more_s = PER_ASSIGNMENT_S * slower.max_rank_load
        fit.add(dataclasses.replace(slower, step_s=slower.step_s + more_s))
        cost = fit.cost()
    assert cost.num_windows == MIN_WINDOWS
    assert cost.is_known
    assert cost.per_assignment_s == pytest.approx(2 * PER_ASSIGNMENT_S, rel=0.15)


def test_windows_that_stall_now_and_then_are_no_change():
    fit = StepCostFit()
    for window in windows(4, count=MAX_WINDOWS, outliers=12):
        fit.add(window)
        fit.cost()
    assert fit.cost().num_windows == MAX_WINDOWS


def test_steps_that_take_no_time_cost_nothing():
    cost = cost_of(
        StepWindow(
            step_s=0.0, max_rank_load=9.0, mean_rank_load=5.0, load_gap=4.0, busy_gap_s=-1e-3
        )
        for _ in range(10)
    )
    assert (cost.fixed_s, cost.per_assignment_s, cost.per_row_s) == (0.0, 0.0, 0.0)
    assert not cost.is_known


def test_no_constant_is_negative():
    for seed in range(40):
        cost = cost_of(windows(seed, noise=0.3, count=10, outliers=0))
        assert min(cost.fixed_s, cost.per_assignment_s, cost.per_row_s) >= 0


def test_idle_windows_alone_are_fitted_without_a_cost():
    cost = cost_of(
        StepWindow(step_s=0.001, max_rank_load=0.0, mean_rank_load=0.0) for _ in range(10)
    )
    assert cost.fixed_s == pytest.approx(0.001)
    assert not cost.is_known


def test_few_windows_give_no_cost_and_old_ones_are_forgotten():
    assert cost_of(list(windows(1))[: MIN_WINDOWS - 1]) is None
    fit = StepCostFit()
    for _ in range(100):
        fit.add(StepWindow(step_s=9.0, max_rank_load=1.0, mean_rank_load=1.0))
    for window in windows(2, count=MAX_WINDOWS, noise=0.003):
        fit.add(window)
    assert fit.cost().num_windows == MAX_WINDOWS
    assert fit.cost().per_assignment_s == pytest.approx(PER_ASSIGNMENT_S, rel=0.05)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e300])
def test_windows_check_themselves(bad):
    with pytest.raises(ValueError, match="must be from 0 to 1e"):
        StepWindow(step_s=bad, max_rank_load=1.0, mean_rank_load=1.0)


def test_a_slow_rank_does_not_change_what_an_assignment_costs():
    rng = np.random.default_rng(0)
    load = rng.uniform(500, 1500, size=8)
    busy_s = 2e-3 + PER_ASSIGNMENT_S * load * (1 + 0.01 * rng.standard_normal(8))
    busy_s[3] += 20e-3
    gap, gap_s = compare_ranks(load, busy_s)
    assert gap == pytest.approx(load.max() - load.min())
    assert gap_s / gap == pytest.approx(PER_ASSIGNMENT_S, rel=0.05)


@pytest.mark.parametrize("load", [[5.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
def test_two_ranks_and_equal_ranks_are_not_compared(load):
    assert compare_ranks(np.array(load), np.arange(len(load)) * 1e-3) == (0.0, 0.0)


def test_of_many_ranks_a_selection_is_compared():
    load = np.linspace(1000.0, 2000.0, 320)
    gap, gap_s = compare_ranks(load, PER_ASSIGNMENT_S * load)
    assert (gap, gap_s) == (1000.0, pytest.approx(1000 * PER_ASSIGNMENT_S))

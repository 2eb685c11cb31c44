"""What a pool learns about its traffic."""

import numpy as np
import pytest

from equipoise.planning.traffic import MAX_KINDS, Traffic

RNG = np.random.default_rng(5)
AVERAGES = {"half_life_s": 60.0, "recent_half_life_s": 5.0, "factor": 2.0}
KINDS = RNG.dirichlet(np.full(32, 0.6), size=(12, 3))


def window(kind, *, assignments=100_000, rng=RNG):
    return np.stack([rng.multinomial(assignments, row) for row in KINDS[kind]]).astype(float)


def learned(kinds, *, traffic=None, duration_s=10.0, **given):
    traffic = Traffic() if traffic is None else traffic
    for kind in kinds:
        traffic = traffic.after(window(kind, **given), duration_s=duration_s, **AVERAGES)
    return traffic


@pytest.mark.parametrize("assignments", [2_000, 100_000, 5_000_000])
def test_windows_that_differ_by_chance_are_of_one_kind(assignments):
    traffic = learned([0] * 30, assignments=assignments)
    assert len(traffic.kinds) == 1
    expected = traffic.expected(most_s=600.0, most_kinds=4, least_weight=0.01, window_s=10.0)
    assert expected.weights.tolist() == [1.0]
    np.testing.assert_allclose(expected.shares[0], KINDS[0], atol=0.05)
    assert expected.samples > 2 * assignments, "the average is more precise than a window"


def test_kinds_that_recur_are_recognised():
    traffic = learned([0, 0, 1, 1, 2, 2] * 4)
    assert len(traffic.kinds) == 3
    np.testing.assert_allclose(traffic.kinds[traffic.current].average.shares, KINDS[2], atol=0.02)


def expected_after(kinds):
    return learned(kinds).expected(most_s=600.0, most_kinds=4, least_weight=0.01, window_s=10.0)


def test_a_kind_that_has_left_before_is_expected_to_leave_again():
    expected = expected_after(([0] * 10 + [1] * 10) * 3)
    np.testing.assert_allclose(expected.shares[0], KINDS[1], atol=0.02)
    np.testing.assert_allclose(expected.weights, [100 / 120, 20 / 120], atol=0.05)


def test_new_traffic_counts_for_more_than_what_it_followed():
    expected = expected_after([0] * 30 + [1])
    np.testing.assert_allclose(expected.shares[0], KINDS[1], atol=0.02)
    assert expected.weights[0] > 0.9


def test_traffic_that_alternates_is_expected_to_go_on_alternating():
    expected = expected_after([0, 1] * 10)
    np.testing.assert_allclose(expected.weights, [1 / 3, 2 / 3], atol=0.05)


def test_a_burst_is_expected_to_end_and_another_to_come():
    usual = expected_after(([0] * 17 + [1] * 3) * 4 + [0])
    np.testing.assert_allclose(usual.weights, [0.9, 0.1], atol=0.05)
    burst = expected_after(([0] * 17 + [1] * 3) * 4)
    np.testing.assert_allclose(burst.weights, [0.6, 0.4], atol=0.1)


def test_traffic_that_drifts_is_known_by_its_latest_windows():
    drift = [(1 - part) * KINDS[0] + part * KINDS[1] for part in np.linspace(0.0, 0.3, 60)]
    traffic = Traffic()
    for shares in drift:
        load = np.stack([RNG.multinomial(20_000, row / row.sum()) for row in shares])
        traffic = traffic.after(load.astype(float), duration_s=10.0, **AVERAGES)
    present = traffic.expected(most_s=600.0, most_kinds=4, least_weight=0.01, window_s=10.0).shares[
        0
    ]
    slow = traffic.kinds[traffic.current].average.shares
    assert np.abs(present - drift[-1]).sum() < np.abs(slow - drift[-1]).sum()


def test_what_is_remembered_is_bounded():
    traffic = learned(np.repeat(np.arange(12), 3).tolist())
    assert len(traffic.kinds) == MAX_KINDS
    assert traffic.current < MAX_KINDS
    np.testing.assert_allclose(sum(kind.time_s for kind in traffic.kinds), 360.0, rtol=0.05)
    np.testing.assert_allclose(
        traffic.expected(
            most_s=600.0, most_kinds=4, least_weight=0.01, window_s=10.0
        ).weights.sum(),
        1.0,
    )


def test_windows_that_usually_differ_by_more_than_chance_are_of_one_kind():
    rng = np.random.default_rng(3)
    traffic = Traffic()
    for _ in range(40):
        varied = np.stack([rng.dirichlet(400.0 * row + 1e-9) for row in KINDS[0]])
        traffic = traffic.after(1e6 * varied, duration_s=10.0, **AVERAGES)
    assert len(traffic.kinds) <= 4
    assert traffic.num_familiar >= 30


def test_the_same_windows_teach_the_same():
    one, other = (
        learned([0, 1, 2, 3] * 5, rng=np.random.default_rng(9)).expected(
            most_s=600.0, most_kinds=4, least_weight=0.01, window_s=10.0
        )
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.shares, other.shares)
    np.testing.assert_array_equal(one.weights, other.weights)


def test_windows_without_traffic_teach_nothing():
    traffic = learned([0])
    nothing = np.zeros_like(window(0))
    assert traffic.after(nothing, duration_s=10.0, **AVERAGES) is traffic


def test_another_model_begins_anew():
    traffic = learned([0, 1])
    other = np.full((5, 8), 100.0)
    after = traffic.after(other, duration_s=10.0, **AVERAGES)
    assert [kind.average.shares.shape for kind in after.kinds] == [(5, 8)]
    assert after.current == 0


def test_how_long_layouts_last_is_learned():
    traffic = learned([0] * 6)
    assert traffic.layouts_last_s(600.0) == 600.0
    for _ in range(5):
        traffic = learned([0] * 6, traffic=traffic.switched())
    assert traffic.layouts_last_s(600.0) == pytest.approx((360 + 600) / 6, rel=0.15)
    traffic = learned([0] * 600, traffic=traffic)
    assert traffic.layouts_last_s(600.0) == 600.0, "forgotten while nothing switches"

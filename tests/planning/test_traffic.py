"""What a pool learns about its traffic."""

import numpy as np
import pytest

from equipoise.planning.traffic import MAX_KINDS, Traffic

RNG = np.random.default_rng(5)
KINDS = RNG.dirichlet(np.full(32, 0.6), size=(12, 3))


def window(kind, *, assignments=100_000, rng=RNG):
    return np.stack([rng.multinomial(assignments, row) for row in KINDS[kind]]).astype(float)


def learned(kinds, *, traffic=None, duration_s=10.0, **given):
    traffic = Traffic() if traffic is None else traffic
    for kind in kinds:
        traffic = traffic.after(
            window(kind, **given), duration_s=duration_s, half_life_s=60.0, factor=2.0
        )
    return traffic


@pytest.mark.parametrize("assignments", [2_000, 100_000, 5_000_000])
def test_windows_that_differ_by_chance_are_of_one_kind(assignments):
    traffic = learned([0] * 30, assignments=assignments)
    assert len(traffic.kinds) == 1
    expected = traffic.expected(600.0)
    assert expected.weights.tolist() == [1.0]
    np.testing.assert_allclose(expected.shares[0], KINDS[0], atol=0.05)
    assert expected.samples > 2 * assignments, "the average is more precise than a window"


def test_kinds_that_recur_are_recognised():
    traffic = learned([0, 0, 1, 1, 2, 2] * 4)
    assert len(traffic.kinds) == 3
    np.testing.assert_allclose(traffic.kinds[traffic.current].shares, KINDS[2], atol=0.02)


def test_the_present_kind_counts_most_in_the_short_run_and_all_kinds_in_the_long_run():
    traffic = learned(([0] * 10 + [1] * 10) * 3)
    soon, later = traffic.expected(10.0), traffic.expected(86_400.0)
    assert soon.weights[0] > 0.9
    np.testing.assert_allclose(later.weights, [0.5, 0.5], atol=0.1)
    np.testing.assert_allclose(later.shares[0], KINDS[1], atol=0.02)


def test_traffic_that_alternates_is_expected_to_go_on_alternating():
    expected = learned([0, 1] * 10).expected(600.0)
    np.testing.assert_allclose(expected.weights, [0.5, 0.5], atol=0.05)


def test_rare_kinds_count_as_rarely_as_they_come():
    expected = learned(([0] * 17 + [1] * 3) * 4 + [0]).expected(600.0)
    np.testing.assert_allclose(expected.weights, [0.85, 0.15], atol=0.05)


def test_what_is_remembered_is_bounded():
    traffic = learned(range(12))
    assert len(traffic.kinds) == MAX_KINDS
    assert traffic.current < MAX_KINDS
    np.testing.assert_allclose(sum(kind.time_s for kind in traffic.kinds), 120.0, rtol=0.02)
    np.testing.assert_allclose(traffic.expected(600.0).weights.sum(), 1.0)


def test_the_same_windows_teach_the_same():
    one, other = (
        learned([0, 1, 2, 3] * 5, rng=np.random.default_rng(9)).expected(100.0) for _ in range(2)
    )
    np.testing.assert_array_equal(one.shares, other.shares)
    np.testing.assert_array_equal(one.weights, other.weights)


def test_windows_without_traffic_teach_nothing():
    traffic = learned([0])
    nothing = np.zeros_like(window(0))
    assert traffic.after(nothing, duration_s=10.0, half_life_s=60.0, factor=2.0) is traffic


def test_another_model_begins_anew():
    traffic = learned([0, 1])
    other = np.full((5, 8), 100.0)
    assert not traffic.knows(other)
    after = traffic.after(other, duration_s=10.0, half_life_s=60.0, factor=2.0)
    assert [kind.shares.shape for kind in after.kinds] == [(5, 8)]
    assert after.current == 0


def test_how_long_layouts_last_is_learned():
    traffic = learned([0] * 6)
    assert traffic.layouts_last_s(600.0) == 600.0
    for _ in range(5):
        traffic = learned([0] * 6, traffic=traffic.switched())
    assert traffic.layouts_last_s(600.0) == pytest.approx((360 + 600) / 6, rel=0.15)
    traffic = learned([0] * 600, traffic=traffic)
    assert traffic.layouts_last_s(600.0) == 600.0, "forgotten while nothing switches"

"""Ranks that are slow beyond what their load explains."""

import numpy as np
import pytest

from equipoise.planning.policy import Policy
from equipoise.planning.slowness import MIN_STEPS, RankPace, find_slow, slowdowns

POLICY = Policy(slow_worker_factor=2.0, slow_worker_windows=3)
EVEN = (100.0,) * 4


def pace(*busy_us, load=EVEN, steps=MIN_STEPS):
    return RankPace(busy_us=np.array(busy_us), load=np.array(load[: len(busy_us)]), steps=steps)


def test_a_rank_slow_in_every_window_is_found_with_its_smallest_factor():
    paces = [pace(10, 11, 35, 9), pace(10, 12, 30, 10), pace(11, 10, 50, 10)]
    (found,) = find_slow(paces, policy=POLICY).values()
    assert found.rank == 2
    assert found.factor == pytest.approx(3.0)
    assert "3.0 times as long" in found.reason


def test_one_good_window_clears_a_rank():
    slow, good = pace(10, 11, 35, 9), pace(10, 11, 12, 9)
    assert not find_slow([slow, slow], policy=POLICY)
    assert not find_slow([slow, good, slow, slow], policy=POLICY)
    assert find_slow([good, slow, slow, slow], policy=POLICY)


def test_a_rank_with_more_load_is_not_slow():
    overloaded = pace(10, 10, 28, 10, load=(100.0, 100.0, 300.0, 100.0))
    assert not find_slow([overloaded] * 3, policy=POLICY)
    slow_as_well = pace(10, 10, 90, 10, load=(100.0, 100.0, 300.0, 100.0))
    assert find_slow([slow_as_well] * 3, policy=POLICY)[2].factor == pytest.approx(3.0)


def test_a_rank_with_little_load_is_not_fast():
    np.testing.assert_allclose(
        slowdowns(pace(10, 10, 10, 10, load=(100.0, 100.0, 1.0, 100.0))), 1.0
    )


def test_of_two_ranks_the_slower_is_found():
    assert list(find_slow([pace(10, 30)] * 3, policy=POLICY)) == [1]


def test_windows_with_too_few_steps_are_skipped():
    slow, short, silent = pace(10, 30), pace(10, 10, steps=MIN_STEPS - 1), pace(10, 0)
    assert slowdowns(short) is None
    assert slowdowns(silent) is None
    assert list(find_slow([slow, short, slow, silent, slow], policy=POLICY)) == [1]

"""Plans: the same seed gives the same run, and every kind occurs."""

from collections import Counter

import pytest

from tests.support.chaos.faults import SUFFER
from tests.support.chaos.plan import Ground, Kind, kinds_of, plan_run


def test_a_seed_determines_the_run():
    assert plan_run(7, ground=Ground.REDIS) == plan_run(7, ground=Ground.REDIS)
    assert plan_run(7, ground=Ground.REDIS) != plan_run(8, ground=Ground.REDIS)


@pytest.mark.parametrize("ground", Ground)
def test_two_hundred_runs_have_every_kind_that_their_ground_supports(ground):
    seen = Counter(
        fault.kind for seed in range(200) for fault in plan_run(seed, ground=ground).faults
    )
    assert seen.keys() == set(kinds_of(ground))
    assert min(seen.values()) >= 5


def test_unsupported_kinds_are_left_out():
    without = frozenset({Kind.CLOCK_JUMPS})
    runs = [plan_run(seed, ground=Ground.SQLITE, without=without) for seed in range(100)]
    assert not any(fault.kind in without for run in runs for fault in run.faults)


def test_every_kind_can_be_injected():
    assert SUFFER.keys() == set(Kind)

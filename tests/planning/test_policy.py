import dataclasses

import pytest

from equipoise.planning.errors import InvalidPolicyError
from equipoise.planning.policy import Algorithm, Policy


def test_the_defaults_are_valid_and_move_few_experts():
    assert Policy().algorithm is Algorithm.INCREMENTAL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interval_s", 0.0),
        ("report_interval_s", -1.0),
        ("heartbeat_interval_s", float("nan")),
        ("slow_half_life_s", float("inf")),
        ("fast_half_life_s", 0.0),
        ("shift_factor", 0.15),
        ("min_assignments", -1.0),
        ("min_gain", 2.0),
        ("cooldown_s", -0.1),
        ("max_wave_bytes", 0),
        ("stage_timeout_s", 0.0),
        ("switch_timeout_s", 1e9),
        ("report_timeout_s", 0.0),
        ("algorithm", "random"),
        ("locality", 1.1),
        ("plan_below", 1.5),
        ("risk_z", -1.0),
        ("bandwidth_bytes_per_s", 0.0),
        ("pull_slowdown", 1.5),
        ("switch_stall_s", -1.0),
        ("payback_s", float("nan")),
    ],
)
def test_a_value_outside_its_range_is_rejected_by_name(field, value):
    with pytest.raises(InvalidPolicyError, match=field):
        Policy(**{field: value})


def test_a_rejection_names_the_range():
    with pytest.raises(InvalidPolicyError, match=r"min_gain must be from 0 to 1, not 2\.0"):
        Policy(min_gain=2.0)


def test_local_plans_need_a_locality_that_keeps_something_local():
    with pytest.raises(InvalidPolicyError, match=r"locality must be below 1 .* for example 0\.25"):
        Policy(algorithm=Algorithm.LOCAL)
    assert Policy(algorithm=Algorithm.LOCAL, locality=0.25).locality == 0.25


def test_the_fast_average_must_be_faster_than_the_slow_one():
    with pytest.raises(InvalidPolicyError, match="fast_half_life_s must be below"):
        Policy(fast_half_life_s=60.0, slow_half_life_s=60.0)


def test_a_worker_may_miss_a_heartbeat():
    with pytest.raises(InvalidPolicyError, match="report_timeout_s must be above"):
        Policy(report_timeout_s=1.0, heartbeat_interval_s=1.0)


def test_ranks_may_meet_before_the_join_times_out():
    with pytest.raises(InvalidPolicyError, match=r"join_timeout_s must be at least meet_timeout_s"):
        Policy(join_timeout_s=20.0)
    assert Policy(join_timeout_s=20.0, meet_timeout_s=20.0).join_timeout_s == 20.0


def test_an_algorithm_may_be_named_by_its_text():
    assert dataclasses.replace(Policy(), algorithm="global").algorithm is Algorithm.GLOBAL

"""Backoff after failed rollouts: longer each time, up to a maximum."""

import pytest

from equipoise.planning.policy import Policy
from equipoise.planning.setbacks import Setbacks

POLICY = Policy(interval_s=10.0, rollback_cooldown_s=60.0)


def setbacks(count, *, at_s=100.0):
    result = Setbacks()
    for number in range(count):
        result = result.one_more(f"rejection {number}", now=at_s)
    return result


def test_without_a_failed_rollout_there_is_no_backoff():
    assert Setbacks().wait(POLICY, now=0.0) is None


@pytest.mark.parametrize(
    ("count", "wait_s"), [(1, 10.0), (2, 20.0), (3, 40.0), (4, 60.0), (9999, 60.0)]
)
def test_every_further_failure_doubles_the_backoff_up_to_a_maximum(count, wait_s):
    assert setbacks(count).wait(POLICY, now=100.0 + wait_s - 0.1)
    assert setbacks(count).wait(POLICY, now=100.0 + wait_s) is None


def test_the_backoff_is_at_least_an_interval():
    policy = Policy(interval_s=10.0, rollback_cooldown_s=0.0)
    assert setbacks(5).wait(policy, now=109.9)
    assert setbacks(5).wait(policy, now=110.0) is None


def test_the_reason_names_the_failures_and_the_backoff():
    assert setbacks(3).wait(POLICY, now=112.0) == (
        "the last 3 rollouts failed, 12.0 s ago (rejection 2); retrying 40 s after that"
    )

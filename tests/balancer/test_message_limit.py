"""How many messages a stream may bring."""

from equipoise.balancer.message_limit import MessageLimit, message_limit
from equipoise.planning.policy import Policy


def taken(limit, *, times, now):
    return sum(limit.take(now=now) for _ in range(times))


def test_a_burst_is_let_through_and_then_what_time_earns():
    limit = MessageLimit(per_s=10.0, burst=20.0)
    assert taken(limit, times=100, now=5.0) == 20
    assert taken(limit, times=100, now=5.5) == 5
    assert taken(limit, times=100, now=5.5) == 0


def test_a_long_rest_earns_one_burst_and_a_clock_that_turns_back_earns_nothing():
    limit = MessageLimit(per_s=10.0, burst=20.0)
    taken(limit, times=100, now=0.0)
    assert taken(limit, times=100, now=1e6) == 20
    assert taken(limit, times=100, now=0.0) == 0


def test_a_worker_that_follows_the_policy_is_never_near_its_limit():
    for interval_s in (0.01, 1.0, 60.0):
        policy = Policy(
            report_interval_s=interval_s, heartbeat_interval_s=interval_s, report_timeout_s=600.0
        )
        limit = message_limit(policy)
        messages = [0.5 * number * interval_s for number in range(1000)]
        assert all(limit.take(now=at_s) for at_s in messages)

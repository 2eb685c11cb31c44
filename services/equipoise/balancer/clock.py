"""A balancer's time: its clock, and how often a pool's timeouts are checked."""

import time
from collections.abc import Callable

from equipoise.planning.policy import Policy

TICK_S = (0.1, 0.5)
"""Least and most seconds between two ticks."""

TICKS_PER_TIMEOUT = 10
"""Ticks within the shortest timeout of a policy, if `TICK_S` allows. The ticks of a pool cost as
much as a report per second."""

SHARE_OF_TICKS = 0.1
"""Largest share of the event loop's time that goes to the ticks of one pool."""

Clock = Callable[[], float]


def steady_clock() -> Clock:
    """Return a clock of unix time that advances with the monotonic clock.

    One number serves timeouts, which must not jump, and dates.
    """
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


def tick_s(policy: Policy, *, latest_s: float = 0.0) -> float:
    """Seconds until the next tick, of which the latest took `latest_s`.

    Timeouts are late by this at most.
    """
    shortest_s = min(
        policy.interval_s,
        policy.report_interval_s,
        policy.heartbeat_interval_s,
        policy.stage_timeout_s,
        policy.switch_timeout_s,
        policy.reform_timeout_s,
        policy.meet_timeout_s,
        policy.join_timeout_s,
        policy.start_timeout_s,
    )
    least_s, most_s = TICK_S
    usual_s = min(most_s, max(least_s, shortest_s / TICKS_PER_TIMEOUT))
    return max(usual_s, latest_s / SHARE_OF_TICKS)

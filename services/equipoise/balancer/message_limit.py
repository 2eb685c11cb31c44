"""`MessageLimit`: a token bucket for the messages of a stream. Pure: the clock is an argument."""

from dataclasses import dataclass, field

from equipoise.planning.policy import Policy

_SLACK = 20.0
"""Multiple of the rate that the policy implies, for the bursts after a new epoch."""

_LEAST_PER_S = 50.0
"""Minimum rate, for messages without an interval: Staged, Switched, Serving, LayoutRejected."""


@dataclass(slots=True, kw_only=True)
class MessageLimit:
    """`per_s` messages per second in the long run, `burst` at once; starts full.

    `now` is in seconds of a monotonic clock; a jump forward earns at most one burst.
    """

    per_s: float
    burst: float
    _left: float = field(init=False)
    _at_s: float | None = None

    def __post_init__(self) -> None:
        assert self.per_s > 0, "the rate is positive"
        assert self.burst >= 1, "the bucket holds a message"
        self._left = self.burst

    def take(self, *, now: float) -> bool:
        """Whether one more message is allowed now; if so, it is counted."""
        if self._at_s is not None:
            earned = max(0.0, now - self._at_s) * self.per_s
            self._left = min(self.burst, self._left + earned)
        self._at_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def message_limit(policy: Policy) -> MessageLimit:
    """Return the limit for workers under `policy`, well above what any of them needs."""
    interval_messages_per_s = 1 / policy.heartbeat_interval_s + 1 / policy.report_interval_s
    per_s = max(_LEAST_PER_S, _SLACK * interval_messages_per_s)
    return MessageLimit(per_s=per_s, burst=4 * per_s)

"""`Pace`: a token bucket that limits the messages of a stream. Pure: the clock is an argument."""

from dataclasses import dataclass, field

from equipoise.planning.policy import Policy

_SLACK = 20.0
"""Multiple of what a worker sends under the policy; bursts follow a new epoch."""

_LEAST_PER_S = 50.0
"""Answers do not follow the policy's intervals: Staged, Switched, Serving, Refused."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """`per_s` messages per second in the long run, `burst` at once; starts full.

    `now` is in seconds of any clock that does not run backwards; a jump is worth one burst.
    """

    per_s: float
    burst: float
    _left: float = field(init=False)
    _at_s: float | None = None

    def __post_init__(self) -> None:
        assert self.per_s > 0, "a pace that ever lets anything through"
        assert self.burst >= 1, "a bucket that holds a message"
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


def message_pace(policy: Policy) -> Pace:
    """The limit for workers under `policy`, above what any of them needs."""
    told = 1 / policy.heartbeat_interval_s + 1 / policy.report_interval_s
    per_s = max(_LEAST_PER_S, _SLACK * told)
    return Pace(per_s=per_s, burst=4 * per_s)

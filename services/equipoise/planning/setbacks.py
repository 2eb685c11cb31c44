"""`Setbacks`: rollouts in a row that ranks did not carry out, and when the next may be tried.

A rank refuses for a reason that the next plan mostly meets again: no memory, bytes that no source
has right. Tried at every window, a pool would pull the same experts for ever and use none of them.
"""

from dataclasses import dataclass

from equipoise.planning.policy import Policy

_MOST_DOUBLINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setbacks:
    """How many there were in a row, when the last one was, and why; none at first."""

    count: int = 0
    latest_s: float = 0.0
    reason: str = ""

    def one_more(self, reason: str, *, now: float) -> "Setbacks":
        """Another rollout came to nothing, for a reason in words."""
        return Setbacks(count=self.count + 1, latest_s=now, reason=reason)

    def wait(self, policy: Policy, *, now: float) -> str | None:
        """Why nothing is rolled out yet; None if it may be.

        The first wait is a planning interval, each further one twice as long, and none is longer
        than the one after a rollback (or than an interval, where that is longer still).
        """
        if not self.count:
            return None
        doubled_s = policy.interval_s * 2.0 ** min(self.count - 1, _MOST_DOUBLINGS)
        wait_s = min(doubled_s, max(policy.interval_s, policy.rollback_cooldown_s))
        if now - self.latest_s >= wait_s:
            return None
        which = "rollout" if self.count == 1 else f"{self.count} rollouts"
        return (
            f"the last {which} came to nothing, {now - self.latest_s:.1f} s ago ({self.reason}), "
            f"and the next is tried {wait_s:g} s after that"
        )

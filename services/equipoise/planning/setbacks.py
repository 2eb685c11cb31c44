"""`Setbacks`: exponential backoff after consecutive failures.

A rollout or an epoch usually fails for a reason that the next one meets again: no memory, bytes
that no source has intact, or ranks that cannot exchange rows. Without backoff, a pool would fetch
the same experts at every window, or form the same group ten times a second.
"""

from dataclasses import dataclass

from equipoise.planning.policy import Policy

_MOST_DOUBLINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setbacks:
    """Consecutive failures."""

    count: int = 0
    latest_s: float = 0.0
    """When the last one began to count."""
    reason: str = ""
    """Why it failed."""

    def one_more(self, reason: str, *, now: float) -> "Setbacks":
        """Count another failure."""
        return Setbacks(count=self.count + 1, latest_s=now, reason=reason)

    def backoff_s(self, *, first_s: float, longest_s: float, num_free: int = 0) -> float:
        """Seconds from the last failure to the next attempt.

        0 after the first `num_free` failures, then `first_s`, and twice as long after each further
        one, up to `longest_s`.
        """
        doublings = min(self.count - num_free - 1, _MOST_DOUBLINGS)
        return 0.0 if doublings < 0 else min(first_s * 2.0**doublings, longest_s)

    def wait(self, policy: Policy, *, now: float) -> str | None:
        """Return why the next rollout must wait after these; None if it need not.

        The first backoff is one planning interval, and each further one twice as long, up to the
        cooldown after a rollback or one interval, whichever is longer.
        """
        longest_s = max(policy.interval_s, policy.rollback_cooldown_s)
        wait_s = self.backoff_s(first_s=policy.interval_s, longest_s=longest_s)
        if now - self.latest_s >= wait_s:
            return None
        which = "rollout" if self.count == 1 else f"{self.count} rollouts"
        return (
            f"the last {which} failed, {now - self.latest_s:.1f} s ago ({self.reason}); "
            f"retrying {wait_s:g} s after that"
        )

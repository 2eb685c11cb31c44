"""`Setbacks`: exponential backoff after consecutive failed rollouts.

A rank usually rejects a layout for a reason that the next plan meets again: no memory, or
bytes that no source has intact. Without backoff, a pool would fetch the same experts at every
window.
"""

from dataclasses import dataclass

from equipoise.planning.policy import Policy

_MOST_DOUBLINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setbacks:
    """Consecutive failed rollouts."""

    count: int = 0
    latest_s: float = 0.0
    """When the last one failed."""
    reason: str = ""
    """Why the last one failed."""

    def one_more(self, reason: str, *, now: float) -> "Setbacks":
        """Count another failed rollout."""
        return Setbacks(count=self.count + 1, latest_s=now, reason=reason)

    def wait(self, policy: Policy, *, now: float) -> str | None:
        """Return why the next rollout must wait; None if it need not.

        The first backoff is one planning interval, and each further one twice as long, up to the
        cooldown after a rollback or one interval, whichever is longer.
        """
        if not self.count:
            return None
        doubled_s = policy.interval_s * 2.0 ** min(self.count - 1, _MOST_DOUBLINGS)
        wait_s = min(doubled_s, max(policy.interval_s, policy.rollback_cooldown_s))
        if now - self.latest_s >= wait_s:
            return None
        which = "rollout" if self.count == 1 else f"{self.count} rollouts"
        return (
            f"the last {which} failed, {now - self.latest_s:.1f} s ago ({self.reason}); "
            f"retrying {wait_s:g} s after that"
        )

"""`Bounds`: every wait of a pool that has a bound, how often it was reached, and its outcome."""

from dataclasses import dataclass, field, replace

from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Rollout, State

_OF_STATE = {
    State.PLANNED: "store",
    State.STAGING: "stage",
    State.STAGED: "switch",
    State.SWITCHED: "store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A wait by its name: at most `bound_s` seconds, reached so often, the last time in words."""

    name: str
    bound_s: float
    reached: int = 0
    latest: str = ""


@dataclass(slots=True)
class Bounds:
    """Counts since the balancer started; it measures nothing itself."""

    policy: Policy
    _by_name: dict[str, Bound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adopt(self.policy)

    def adopt(self, policy: Policy) -> None:
        """From now on waits have the bounds of `policy`; counts go on."""
        self.policy = policy
        for name, bound_s in (
            ("plan", policy.plan_timeout_s),
            ("stage", policy.stage_timeout_s),
            ("switch", policy.switch_timeout_s),
            ("store", policy.stage_timeout_s),
            ("report", policy.silent_after_s),
            ("reform", policy.reform_timeout_s),
            ("meet", policy.meet_timeout_s),
            ("start", policy.start_timeout_s),
        ):
            known = self._by_name.get(name, Bound(name=name, bound_s=bound_s))
            self._by_name[name] = replace(known, bound_s=bound_s)

    def note(self, name: str, what: str) -> None:
        """A bound was reached; `what` says what was done about it."""
        known = self._by_name[name]
        self._by_name[name] = replace(known, reached=known.reached + 1, latest=what)

    def note_rollout(self, before: Rollout, after: Rollout | None) -> None:
        """Time passed for a rollout; if it changed by that, its bound was reached."""
        if after is not None and after.reason != before.reason:
            self.note(_OF_STATE[before.state], after.reason)

    def all(self) -> tuple[Bound, ...]:
        """Every bound."""
        return tuple(self._by_name.values())

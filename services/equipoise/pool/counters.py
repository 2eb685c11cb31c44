"""`Bounds`: every wait of a pool that has a bound, how often it was reached, and its outcome."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Rollout, State
from equipoise.wire.messages import Wait, WorkerBound

WRITE_TIMEOUT_S = 10.0
"""Seconds a write to the store may take before it counts as failed."""

MAX_WORKERS = 2**16
"""Workers whose counts are kept; of more, those that came first are forgotten."""

_OF_STATE = {
    State.PLANNED: "persist",
    State.STAGING: "stage",
    State.STAGED: "switch",
    State.SWITCHED: "persist",
}


_WAITS = frozenset(Wait)


def order_bound_s(policy: Policy) -> float:
    """Seconds within which an order of an operator is answered.

    The wait for a plan under way, a plan and the wait for its turn, what is written before, and the
    record of the order.
    """
    return 3 * policy.plan_timeout_s + 2 * WRITE_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A wait by its name: at most `bound_s` seconds, reached so often, the last time in words."""

    name: str
    bound_s: float
    reached: int = 0
    latest: str = ""

    def again(self, what: str) -> "Bound":
        """It was reached once more; `what` says what was done about it."""
        return replace(self, reached=self.reached + 1, latest=what)


@dataclass(slots=True)
class Bounds:
    """Counts since the balancer leads; it measures nothing itself.

    Workers count their own waits since they started; what they tell is added up by name.
    """

    policy: Policy
    _by_name: dict[str, Bound] = field(default_factory=dict)
    _told: dict[str, "_Told"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adopt(self.policy)

    def adopt(self, policy: Policy) -> None:
        """From now on waits have the bounds of `policy`; counts go on."""
        self.policy = policy
        for name, bound_s in (
            ("plan", policy.plan_timeout_s),
            ("stage", policy.stage_timeout_s),
            ("switch", policy.switch_timeout_s),
            ("persist", policy.stage_timeout_s),
            ("store", WRITE_TIMEOUT_S),
            ("report", policy.silent_after_s),
            ("reform", policy.reform_timeout_s),
            ("meet", policy.meet_timeout_s),
            ("start", policy.start_timeout_s),
        ):
            known = self._by_name.get(name, Bound(name=name, bound_s=bound_s))
            self._by_name[name] = replace(known, bound_s=bound_s)

    def note(self, name: str, what: str) -> None:
        """A bound was reached; `what` says what was done about it."""
        self._by_name[name] = self._by_name[name].again(what)

    def note_rollout(self, before: Rollout, after: Rollout | None) -> None:
        """Time passed for a rollout; if it changed by that, its bound was reached."""
        if after is not None and after.reason != before.reason:
            self.note(_OF_STATE[before.state], after.reason)

    def hear(self, worker: str, *, boot_id: str, told: Sequence[WorkerBound]) -> tuple[str, ...]:
        """Add what a worker counted since it told last; gives the names that we do not know."""
        if not told:
            return ()
        known = self._told.get(worker)
        if known is None or known.boot_id != boot_id:
            while len(self._told) >= MAX_WORKERS:
                del self._told[next(iter(self._told))]
            known = self._told[worker] = _Told(boot_id=boot_id)
        for bound in told:
            if bound.name in _WAITS:
                self._add(worker, bound, before=known.reached.get(bound.name, 0))
                known.reached[bound.name] = bound.reached
        return tuple(bound.name for bound in told if bound.name not in _WAITS)

    def all(self) -> tuple[Bound, ...]:
        """Every bound; those of workers once one has told."""
        return tuple(self._by_name.values())

    def _add(self, worker: str, told: WorkerBound, *, before: int) -> None:
        sum_before = self._by_name.get(told.name, Bound(name=told.name, bound_s=told.bound_s))
        grown = max(0, told.reached - before)
        self._by_name[told.name] = Bound(
            name=told.name,
            bound_s=told.bound_s,
            reached=sum_before.reached + grown,
            latest=f"{worker}: {told.latest}" if grown else sum_before.latest,
        )


@dataclass(slots=True, kw_only=True)
class _Told:
    """What a worker told of a boot: how often each bound was reached."""

    boot_id: str
    reached: dict[str, int] = field(default_factory=dict)

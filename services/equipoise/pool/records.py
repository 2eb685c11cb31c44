"""What is recorded of a pool, and outlives the balancer that recorded it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from equipoise.planning.arrays import Load
from equipoise.planning.layout import Layout

FAST = "fast"
SLOW = "slow"

SLOW_SQUARES = "slow squares"
"""Squares of the slow average's rates, from which their variance follows; kept where a policy plans
for risk. A record of its own, so that a store that has none is like a load that never varied."""

MAX_AUDIT = 16
"""Orders of operators kept for people to read; the store has more."""


class RefusedWorkerError(Exception):
    """A worker that this pool cannot take; `kind` is short and fixed, for counting."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who takes part in an epoch: worker names in rank order."""

    epoch: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AverageRecord:
    """A decayed sum as it was at a time.

    `decayed_load` is float64 [layers, experts], decayed with `half_life_s`; `weight_s` are the
    seconds it stands for, decayed alike; `time_unix_s` is when both were right.
    """

    half_life_s: float
    time_unix_s: float
    weight_s: float
    decayed_load: Load


class DecisionKind(StrEnum):
    """What was decided about."""

    PLAN = "plan"
    """A plan, yes or no."""

    POLICY = "policy"
    """Another policy came into force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision with its reason. `sequence` is given by the store, from 1.

    `policy_hash` names the policy that made it, or that came into force. What is of a plan has its
    default where there was none.
    """

    sequence: int = 0
    time_unix_s: float
    accepted: bool
    reason: str
    base_generation: int
    balancedness_current: float = 0.0
    balancedness_proposed: float = 0.0
    moves: int = 0
    bytes: int = 0
    algorithm: str = ""
    plan_ms: float = 0.0
    shift_detected: bool = False
    kind: DecisionKind = DecisionKind.PLAN
    policy_hash: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", DecisionKind(self.kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """An operator's order and what became of it. `sequence` is given by the store, from 1.

    `who` is the caller as we know it, `what` the order with its arguments, `outcome` the answer.
    """

    sequence: int = 0
    time_unix_s: float
    who: str
    what: str
    accepted: bool
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """Nothing, unless told: the balancer then plans as its policy says.

    `paused` and `pinned` say who wanted it and why; empty when it is not so. `pin` is the layout
    whose placement is kept (its own number does not count), `pinned_generation` the committed one
    that had it, 0 if it was given as a table.
    """

    paused: str = ""
    pinned: str = ""
    pin: Layout | None = None
    pinned_generation: int = 0

    def __post_init__(self) -> None:
        assert bool(self.pinned) == (self.pin is not None), "a pin has a layout and a reason"

    @property
    def reason(self) -> str:
        """Why the balancer adopts no plan of its own; empty when it may."""
        words = [f"paused by {self.paused}"] if self.paused else []
        words += [f"pinned by {self.pinned}"] if self.pinned else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Nothing of it is believed before the workers were heard, except that numbers were used."""

    committed: Layout | None = None
    proposed: Layout | None = None
    next_generation: int = 1
    membership: Membership | None = None
    averages: Mapping[str, AverageRecord] = field(default_factory=dict)
    last_decision: DecisionRecord | None = None
    hold: Hold = field(default_factory=Hold)
    audit: tuple[AuditRecord, ...] = ()

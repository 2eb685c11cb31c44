"""What the store keeps of a pool. It outlives the balancer that recorded it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from equipoise.planning.arrays import Load
from equipoise.planning.expected_gain import ExpectedGain, RealisedGain
from equipoise.planning.layout import Layout
from equipoise.planning.proposal import Proposal

FAST = "fast"
SLOW = "slow"

SLOW_SQUARES = "slow squares"
"""Squares of the slow average's rates, which give their variance; kept where a policy plans for
risk. It is a record of its own, so that a store without it is like a load that never varied."""

MAX_AUDIT = 16
"""Audit records kept for status; the store has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMembers:
    """Who takes part in an epoch."""

    epoch: int
    """Its number."""

    workers: tuple[str, ...]
    """Worker names in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AverageRecord:
    """A moving average at a point in time."""

    half_life_s: float
    """Half-life with which it decays, seconds."""

    time_unix_s: float
    """Unix time for which it holds."""

    weight_s: float
    """Decayed seconds that it covers."""

    decayed_load: Load
    """Decayed assignments, float64 [layers, experts]."""


class DecisionKind(StrEnum):
    """What a decision is about."""

    PLAN = "plan"
    """A plan, yes or no."""

    POLICY = "policy"
    """Another policy came into force."""

    QUARANTINE = "quarantine"
    """A worker was quarantined (yes) or released (no)."""

    OUTCOME = "outcome"
    """A rollout was judged: its layout is kept (yes) or rolled back (no)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision with its reason. Fields about a plan have their default where there was none."""

    sequence: int = 0
    """Number from the store, from 1."""

    time_unix_s: float
    """When it was made."""

    accepted: bool
    """Yes or no."""

    reason: str
    """Why."""

    base_generation: int
    """Generation that the pool ran."""

    balancedness_current: float = 0.0
    """Balancedness of that generation on the latest window; 0 if there was no traffic."""

    balancedness_proposed: float = 0.0
    """Balancedness of the plan on the latest window; 0 if not measured."""

    moves: int = 0
    """Slots that the plan changes."""

    bytes: int = 0
    """Bytes that these moves copy."""

    algorithm: str = ""
    """Algorithm of the plan, or "rollback" or "pin"."""

    plan_ms: float = 0.0
    """Time that the plan took."""

    shift_detected: bool = False
    """Whether traffic had shifted in the window."""

    kind: DecisionKind = DecisionKind.PLAN
    """What it is about."""

    policy_hash: str = ""
    """Digest of the policy that made it, or that came into force."""

    phase: str = ""
    """Phase whose load it is about: prefill, decode or mixed; empty if it is about none."""

    throughput_gain: float = 0.0
    """Fraction by which the plan raises throughput: measured, or an upper bound if
    `step_s_proposed` is 0."""

    step_s_current: float = 0.0
    """Seconds of a step when the plan was judged; 0 if not measured."""

    step_s_proposed: float = 0.0
    """Seconds of a step that the plan predicts; 0 if too little was measured."""

    balancedness_realised: float = 0.0
    """Of an outcome: balancedness as measured; 0 of others."""

    step_s_realised: float = 0.0
    """Of an outcome: seconds of a step as measured; 0 if not reported."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", DecisionKind(self.kind))

    @classmethod
    def of_proposal(
        cls,
        proposal: Proposal,
        *,
        phase: str = "",
        now: float,
        veto: str | None = None,
        plan_ms: float = 0.0,
    ) -> "DecisionRecord":
        """The verdict on a plan for the load of `phase`.

        `veto` is why the pool rejects one that the verdict accepts.
        """
        request, verdict = proposal.request, proposal.verdict
        step = verdict.step
        return cls(
            time_unix_s=now,
            accepted=verdict.accepted and veto is None,
            reason=f"{veto}: {verdict.reason}" if veto else verdict.reason,
            base_generation=request.current.generation,
            balancedness_current=verdict.balancedness_current,
            balancedness_proposed=verdict.balancedness_proposed,
            moves=verdict.moves,
            bytes=verdict.bytes,
            algorithm=proposal.plan.algorithm.value,
            plan_ms=plan_ms,
            shift_detected=request.shift.detected,
            policy_hash=request.policy_hash,
            phase=phase,
            throughput_gain=verdict.throughput_gain,
            step_s_current=0.0 if step is None else step.current_s,
            step_s_proposed=0.0 if step is None else step.proposed_s,
        )

    @classmethod
    def of_outcome(
        cls,
        expected: ExpectedGain,
        realised: RealisedGain,
        *,
        policy_hash: str,
        phase: str,
        now: float,
    ) -> "DecisionRecord":
        """What a rollout was expected to gain, beside what it gained."""
        step = expected.step
        return cls(
            kind=DecisionKind.OUTCOME,
            time_unix_s=now,
            accepted=not realised.goes_back,
            reason=realised.reason,
            base_generation=expected.generation,
            balancedness_current=realised.balancedness - realised.gain,
            balancedness_proposed=expected.balancedness_expected,
            balancedness_realised=realised.balancedness,
            policy_hash=policy_hash,
            phase=phase,
            throughput_gain=0.0 if step is None else step.throughput_gain,
            step_s_current=0.0 if step is None else step.current_s,
            step_s_proposed=0.0 if step is None else step.proposed_s,
            step_s_realised=realised.step_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """An operator's request and its outcome."""

    sequence: int = 0
    """Number from the store, from 1."""

    time_unix_s: float
    """When it was handled."""

    who: str
    """The caller, as authenticated."""

    what: str
    """The operation with its arguments."""

    accepted: bool
    """Whether it was carried out."""

    outcome: str
    """The answer that the caller got."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """What an operator holds a pool to. By default nothing: the balancer plans by its policy."""

    paused: str = ""
    """Who paused it, and why; empty if it is not paused."""

    pinned: str = ""
    """Who pinned it, and why; empty if it is not pinned."""

    pin: Layout | None = None
    """Layout whose placement is kept; its generation does not matter."""

    pinned_generation: int = 0
    """The committed generation that had this layout; 0 if it was sent as a table."""

    def __post_init__(self) -> None:
        assert bool(self.pinned) == (self.pin is not None), "a pin has a layout and a reason"

    def changed_as(self, before: "Hold", after: "Hold") -> "Hold":
        """This hold with what differs between two others."""
        paused = self.paused if after.paused == before.paused else after.paused
        pins = self if after.pin is before.pin and after.pinned == before.pinned else after
        return replace(pins, paused=paused)

    @property
    def reason(self) -> str:
        """Why the balancer adopts no plan of its own; empty if it may."""
        words = [f"paused by {self.paused}"] if self.paused else []
        words += [f"pinned by {self.pinned}"] if self.pinned else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """What the store knew of a pool when the balancer started.

    Until the workers report, nothing of it is believed, except that its numbers are used.
    """

    committed: Layout | None = None
    """The committed layout."""

    proposed: Layout | None = None
    """A newer layout that was being rolled out."""

    next_generation: int = 1
    """The lowest generation that was never used."""

    members: EpochMembers | None = None
    """The latest epoch."""

    averages: Mapping[str, AverageRecord] = field(default_factory=dict)
    """Moving averages by name."""

    last_decision: DecisionRecord | None = None
    """The latest decision."""

    hold: Hold = field(default_factory=Hold)
    """What an operator holds the pool to."""

    audit: tuple[AuditRecord, ...] = ()
    """The latest audit records, newest first."""

    last_audit: int = 0
    """The highest number that an audit record ever had; the record may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForgottenRecords:
    """What a balancer still knows of a pool whose store has lost it.

    A record keeps its number, unless the store has one of the same or a higher number.
    """

    after: int = 0
    """Number of the latest audit record that the store had when it was read; 0 for none."""

    audit: tuple[AuditRecord, ...] = ()
    """Audit records, oldest first; their numbers follow `after`."""

    hold: Hold | None = None
    """What the pool is held to since the latest of them; None if the store knows that."""

    decision: DecisionRecord | None = None
    """The latest decision; None if the store has it."""

    members: EpochMembers | None = None
    """The highest epoch; None if the store has it."""

    next_generation: int = 0
    """The lowest generation that was never used; 0 if the store knows that."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is lost, for the log."""
        lost = {
            f"{len(self.audit)} audit records": bool(self.audit),
            "its hold": self.hold is not None,
            "a decision": self.decision is not None,
            "its epoch": self.members is not None,
            "its highest generation": self.next_generation > 0,
        }
        return tuple(kind for kind, is_lost in lost.items() if is_lost)

    def added_to(self, memory: PoolMemory) -> PoolMemory:
        """Return what the store knows once these are written back."""
        return replace(
            memory,
            audit=(*reversed(self.audit), *memory.audit)[:MAX_AUDIT],
            hold=self.hold or memory.hold,
            last_decision=self.decision or memory.last_decision,
            members=self.members or memory.members,
            next_generation=max(self.next_generation, memory.next_generation),
        )

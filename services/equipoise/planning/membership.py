"""`next_epoch`: when the ranks of a pool are dealt anew, to whom, and why.

Pure: what is known of each worker goes in, a decision in words comes out. It is asked again after
every word and every tick, so it remembers nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.policy import Policy


class MemberState(StrEnum):
    """What a worker is to its pool now."""

    NEW = "new"
    """Waits for a rank; the present epoch has never had it."""

    SURVIVOR = "survivor"
    """The group of the present epoch is over for it; it waits for a rank in the next."""

    JOINING = "joining"
    """Has a rank and does not serve yet."""

    SERVING = "serving"
    """Has a rank and takes part in steps."""

    SLOW = "slow"
    """Serves, but holds the others up: they are to go on without it if they can."""

    MISSING = "missing"
    """Has a rank, but left, died, or fell silent."""

    STUCK = "stuck"
    """Was left out, because it did not let go of an epoch that its peers lost, fell silent, or was
    slow; it is not dealt a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCandidate:
    """One worker: how it stands since when, in words where it is missing.

    `holds` tells that its slots hold experts of an epoch that is over.
    """

    name: str
    state: MemberState
    since_s: float
    holds: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDecision:
    """The decision. `workers` take part in the next epoch; there is none yet if they are none.

    `reason` says why it opens or what is waited for; empty when nobody wants anything. `left_out`
    did not let go of the present epoch in time. `is_down` tells that those who are here have too
    few slots. `bound` names the wait whose bound was reached, if one was.
    """

    workers: tuple[str, ...] = ()
    reason: str = ""
    left_out: tuple[str, ...] = ()
    is_down: bool = False
    bound: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Candidates by state."""

    new: list[EpochCandidate]
    survivors: list[EpochCandidate]
    joining: list[EpochCandidate]
    serving: list[EpochCandidate]
    slow: list[EpochCandidate]
    missing: list[EpochCandidate]

    @property
    def free(self) -> list[EpochCandidate]:
        return [*self.new, *self.survivors]

    @property
    def bound(self) -> list[EpochCandidate]:
        return [*self.joining, *self.serving, *self.slow]


def next_epoch(
    candidates: Sequence[EpochCandidate],
    *,
    num_ranks: int,
    slots_per_rank: int,
    num_experts: int,
    unheard: frozenset[str],
    is_rolling_out: bool,
    policy: Policy,
    now: float,
) -> EpochDecision:
    """Decide whether ranks are dealt now.

    `num_ranks` is what a pool waits for before it first opens. `unheard` are workers that took part
    in the latest epoch as far as the store knows and were not heard of since the balancer started.

    A group that is whole is only broken up for workers that came anew, and not during a rollout. A
    group that is over is not waited for longer than `policy.reform_timeout_s`.
    """
    pool = _sorted_out(candidates)
    opening = _without_ranks(
        pool, num_ranks=num_ranks, unheard=unheard, policy=policy, now=now
    ) or _beside_ranks(
        pool,
        least=-(-num_experts // slots_per_rank),
        unheard=unheard,
        is_rolling_out=is_rolling_out,
        policy=policy,
        now=now,
    )
    num_slots = len(opening.workers) * slots_per_rank
    if opening.workers and num_slots < num_experts:
        needed = -(-num_experts // slots_per_rank)
        return EpochDecision(
            reason=f"{len(opening.workers)} workers ({_names(pool.free)}) with {num_slots} slots "
            f"cannot hold {num_experts} experts: {needed} workers are needed; {opening.reason}",
            is_down=True,
        )
    return opening


def _sorted_out(candidates: Sequence[EpochCandidate]) -> _Pool:
    by_state: dict[MemberState, list[EpochCandidate]] = {state: [] for state in MemberState}
    for candidate in candidates:
        by_state[candidate.state].append(candidate)
    return _Pool(
        new=by_state[MemberState.NEW],
        survivors=by_state[MemberState.SURVIVOR],
        joining=by_state[MemberState.JOINING],
        serving=by_state[MemberState.SERVING],
        slow=by_state[MemberState.SLOW],
        missing=by_state[MemberState.MISSING],
    )


def _without_ranks(
    pool: _Pool, *, num_ranks: int, unheard: frozenset[str], policy: Policy, now: float
) -> EpochDecision | None:
    """Nobody who is here is bound to an epoch: all wait. None if somebody is."""
    if pool.bound:
        return None
    if not pool.free:
        return EpochDecision()
    waited_s = now - min(candidate.since_s for candidate in pool.free)
    holders = [candidate for candidate in pool.free if candidate.holds]
    if holders and not unheard:
        why = _faults(pool.missing) or holders[0].reason
        return _open(pool, f"the group was lost: {why}")
    if len(pool.free) >= num_ranks:
        return _open(pool, f"{len(pool.free)} workers are here")
    name, bound_s = (
        ("reform", policy.reform_timeout_s) if holders else ("start", policy.start_timeout_s)
    )
    if waited_s < bound_s:
        return EpochDecision(
            reason=f"{len(pool.free)} of {num_ranks} workers are here ({_names(pool.free)}): "
            f"waiting for {num_ranks - len(pool.free)} more, at most {bound_s:g} s"
        )
    return _open(
        pool,
        f"{len(pool.free)} of {num_ranks} workers came within {bound_s:g} s",
        bound=name,
    )


def _beside_ranks(
    pool: _Pool,
    *,
    least: int,
    unheard: frozenset[str],
    is_rolling_out: bool,
    policy: Policy,
    now: float,
) -> EpochDecision:
    """Some are bound to the present epoch. `least` workers have slots for all experts."""
    if pool.survivors:
        return _after_a_loss(pool, least=least, policy=policy, now=now)
    if pool.joining and pool.missing:
        return _open(pool, f"{_faults(pool.missing)}, before all ranks served")
    if pool.new and (pool.missing or unheard):
        return _beside_a_gap(pool, unheard=unheard, policy=policy, now=now)
    if pool.slow and not pool.joining and not is_rolling_out:
        return _without_slow(pool, least=least)
    return _growing(pool, is_rolling_out=is_rolling_out, policy=policy, now=now)


def _after_a_loss(pool: _Pool, *, least: int, policy: Policy, now: float) -> EpochDecision:
    """The group is over for some: the others will notice, or are left out if they can be spared."""
    waited_s = now - min(candidate.since_s for candidate in pool.survivors)
    why = _faults(pool.missing) or pool.survivors[0].reason
    if waited_s < policy.reform_timeout_s:
        return EpochDecision(
            reason=f"the group was lost ({why}): waiting for {_names(pool.bound)} to let go of it, "
            f"at most {policy.reform_timeout_s:g} s"
        )
    reason = (
        f"the group was lost: {why}; {_names(pool.bound)} did not let go of it within "
        f"{policy.reform_timeout_s:g} s"
    )
    if len(pool.free) < least:
        return _open(pool, f"{reason} and cannot be spared", bound="reform")
    return EpochDecision(
        workers=tuple(candidate.name for candidate in pool.free),
        left_out=tuple(candidate.name for candidate in pool.bound),
        reason=reason,
        bound="reform",
    )


def _beside_a_gap(
    pool: _Pool, *, unheard: frozenset[str], policy: Policy, now: float
) -> EpochDecision:
    """A rank is gone and its peers did not say that their group is over.

    Perhaps only its stream broke, and it comes back; perhaps they are about to notice.
    """
    waited_s = now - max(candidate.since_s for candidate in (*pool.new, *pool.missing))
    unknown = [f"{name} was not heard of yet" for name in sorted(unheard)]
    faults = "; ".join(filter(None, (_faults(pool.missing), *unknown)))
    if waited_s < policy.reform_timeout_s:
        return EpochDecision(
            reason=f"{_names(pool.new)} waits for a rank: {faults}, and the others are given "
            f"{policy.reform_timeout_s:g} s to notice"
        )
    return _open(pool, f"{_names(pool.new)} joins; {faults}", bound="reform")


def _without_slow(pool: _Pool, *, least: int) -> EpochDecision:
    """The group is whole, but some hold it up: it goes on without them if they can be spared."""
    others = [*pool.new, *pool.serving]
    why = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in pool.slow)
    if len(others) < least:
        return EpochDecision(reason=f"slow and cannot be spared: {why}")
    return EpochDecision(
        workers=tuple(candidate.name for candidate in others),
        left_out=tuple(candidate.name for candidate in pool.slow),
        reason=f"goes on without who is slow: {why}",
    )


def _growing(pool: _Pool, *, is_rolling_out: bool, policy: Policy, now: float) -> EpochDecision:
    """The group is whole; whoever came anew is taken in at a good moment."""
    if not pool.new:
        return EpochDecision()
    newest_s = max(candidate.since_s for candidate in pool.new)
    if pool.joining:
        when = f"when {_names(pool.joining)} serves"
    elif is_rolling_out:
        when = "when the rollout is over"
    elif now - newest_s < policy.join_settle_s:
        when = "in a moment"
    else:
        return _open(pool, f"{_names(pool.new)} joins")
    return EpochDecision(reason=f"{_names(pool.new)} joins {when}")


def _open(pool: _Pool, reason: str, *, bound: str = "") -> EpochDecision:
    return EpochDecision(
        workers=tuple(candidate.name for candidate in (*pool.free, *pool.bound)),
        reason=reason,
        bound=bound,
    )


def _faults(missing: list[EpochCandidate]) -> str:
    return "; ".join(f"{candidate.name} is missing: {candidate.reason}" for candidate in missing)


def _names(candidates: Sequence[EpochCandidate]) -> str:
    return ", ".join(sorted(candidate.name for candidate in candidates))

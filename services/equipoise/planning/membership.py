"""`next_epoch`: when a pool opens a new epoch, with which workers, and why.

Stateless: it decides again after every message and every tick from what is known of each worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.expert_needs import ExpertNeeds
from equipoise.planning.policy import Policy

_MOST_SETTLES = 10
"""Times that those who came first wait for later ones: a worker may come again without end."""

_MAX_NAMED = 4
"""Items that a reason names one by one; it counts the others."""


class MemberState(StrEnum):
    """State of a worker in its pool."""

    NEW = "new"
    """Waits for a rank; it was never part of the current epoch, nor is any rank of the group that
    it may still serve in."""

    SURVIVOR = "survivor"
    """Its group of the current epoch is over; it waits for a rank in the next."""

    AHEAD = "ahead"
    """Has a rank, but cannot take it up: it has taken up an epoch that the balancer forgot. The
    next epoch has a higher number."""

    JOINING = "joining"
    """Has a rank but does not serve yet."""

    SERVING = "serving"
    """Has a rank and takes part in steps."""

    SLOW = "slow"
    """Serves, but slows the others down: they should continue without it if they can."""

    QUARANTINED = "quarantined"
    """Has a rank, but wrong bytes: the others continue without it."""

    MISSING = "missing"
    """Has a rank, but left, died, or fell silent."""

    STUCK = "stuck"
    """Was left out because it did not leave a lost epoch, fell silent, was slow or has wrong
    bytes; it gets no rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCandidate:
    """A worker that may take part in the next epoch."""

    name: str
    state: MemberState
    since_s: float
    """When it entered this state."""
    holds: bool = False
    """Whether its slots hold experts of an epoch that is over."""
    reason: str = ""
    """Why it is missing, slow, ahead or quarantined."""
    num_places: int = 0
    """Experts that it has room for over all layers; 0 for one in each slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDecision:
    """Whether a new epoch opens."""

    workers: tuple[str, ...] = ()
    """Workers of the next epoch; empty if none opens yet."""
    reason: str = ""
    """Why it opens, or what the pool waits for; empty if there is nothing to do."""
    left_out: tuple[str, ...] = ()
    """Workers of the current epoch that do not take part in the next."""
    is_down: bool = False
    """Whether the connected workers have too few slots for all experts."""
    timeout: str = ""
    """Name of the wait that timed out, if one did."""
    is_disputed: bool = False
    """Whether the workers that are left out report the group as lost, but most ranks serve in
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workers:
    """Candidates by state."""

    new: list[EpochCandidate]
    survivor: list[EpochCandidate]
    ahead: list[EpochCandidate]
    joining: list[EpochCandidate]
    serving: list[EpochCandidate]
    slow: list[EpochCandidate]
    quarantined: list[EpochCandidate]
    missing: list[EpochCandidate]
    stuck: list[EpochCandidate]

    @property
    def free(self) -> list[EpochCandidate]:
        return [*self.new, *self.survivor, *self.ahead]

    @property
    def bound(self) -> list[EpochCandidate]:
        return [*self.joining, *self.serving, *self.slow]


def next_epoch(
    candidates: Sequence[EpochCandidate],
    *,
    num_ranks: int,
    needs: ExpertNeeds,
    unheard: frozenset[str],
    is_on_record: bool,
    is_rolling_out: bool,
    policy: Policy,
    now: float,
    engine: str = "",
) -> EpochDecision:
    """Decide whether a new epoch opens now.

    A complete group is interrupted only for new workers and never during a rollout. Workers of a
    lost group are not waited for longer than `policy.reform_timeout_s`.

    Args:
        candidates: the known workers.
        num_ranks: ranks that a pool waits for before it first opens.
        needs: the room that all experts need.
        unheard: workers of the latest stored epoch that have not connected since the balancer
            started.
        is_on_record: whether an epoch of the pool is known. If not, a worker of a lost group alone
            does not open one at once: others may be about to connect.
        is_rolling_out: whether a rollout is in progress.
        policy: the timeouts.
        now: the clock that `since_s` is on.
        engine: the engine of another project that the ranks are part of. They form their group
            themselves and keep it, so no epoch opens for them; empty for our workers.
    """
    pool = _Workers(
        **{
            state.value: [candidate for candidate in candidates if candidate.state is state]
            for state in MemberState
        }
    )
    if engine:
        return _kept(candidates, are_others=bool(pool.free), engine=engine)
    opening = (
        _above(pool)
        or _without_quarantined(pool, needs=needs)
        or _without_ranks(
            pool,
            num_ranks=num_ranks,
            is_complete=not unheard and (is_on_record or len(pool.free) > 1),
            policy=policy,
            now=now,
        )
        or _beside_ranks(
            pool,
            needs=needs,
            unheard=unheard,
            is_rolling_out=is_rolling_out,
            policy=policy,
            now=now,
        )
    )
    names = frozenset(opening.workers)
    chosen = [one for one in candidates if one.name in names]
    if chosen and (lack := needs.lack(_places(chosen))):
        return EpochDecision(
            reason=f"{len(chosen)} workers ({_names(pool.free)}) with {lack}; {opening.reason}",
            is_down=True,
        )
    return opening


def _kept(candidates: Sequence[EpochCandidate], *, are_others: bool, engine: str) -> EpochDecision:
    """The ranks of an engine keep their group; the rest is reported, `are_others` connected too."""
    present = (MemberState.SERVING, MemberState.SLOW)
    absent = [one for one in candidates if one.state not in present]
    if not absent:
        return EpochDecision()
    others = ", and give another engine a pool of its own" if are_others else ""
    return EpochDecision(
        reason=f"waiting for {_names(absent)}: the ranks of {engine} keep their group, so no epoch "
        f"opens without them; restart the engine if one is gone{others}"
    )


def _above(pool: _Workers) -> EpochDecision | None:
    """Some workers cannot take up the current epoch, so its ranks would wait for them in vain."""
    return _open(pool, _faults([*pool.ahead, *pool.missing])) if pool.ahead else None


def _without_ranks(
    pool: _Workers, *, num_ranks: int, is_complete: bool, policy: Policy, now: float
) -> EpochDecision | None:
    """All connected workers wait for a rank. None if one is still bound to the epoch.

    `is_complete` says that no worker of the latest epoch is known to be absent.
    """
    if pool.bound:
        return None
    if not pool.free:
        return EpochDecision()
    waited_s = now - min(candidate.since_s for candidate in pool.free)
    holders = [candidate for candidate in pool.free if candidate.holds]
    if holders and is_complete:
        why = _faults(pool.missing) or holders[0].reason
        return _open(pool, f"the group was lost: {why}")
    if len(pool.free) >= max(num_ranks, 2 if holders else 1):
        return _open(pool, f"{len(pool.free)} workers are connected")
    name, timeout_s = (
        ("reform", policy.reform_timeout_s) if holders else ("start", policy.start_timeout_s)
    )
    if waited_s < timeout_s:
        return EpochDecision(
            reason=f"{len(pool.free)} of {num_ranks} workers are connected ({_names(pool.free)}): "
            f"waiting for {max(1, num_ranks - len(pool.free))} more, at most {timeout_s:g} s"
        )
    return _open(
        pool,
        f"{len(pool.free)} of {num_ranks} workers connected within {timeout_s:g} s",
        timeout=name,
    )


def _beside_ranks(
    pool: _Workers,
    *,
    needs: ExpertNeeds,
    unheard: frozenset[str],
    is_rolling_out: bool,
    policy: Policy,
    now: float,
) -> EpochDecision:
    """Some workers are bound to the current epoch."""
    if pool.survivor:
        return _after_a_loss(pool, needs=needs, policy=policy, now=now)
    if pool.joining and pool.missing:
        return _open(pool, f"{_faults(pool.missing)}, before all ranks served")
    if any(_is_late(one, policy=policy, now=now) for one in pool.joining):
        return _without_late(pool, needs=needs, policy=policy, now=now)
    if pool.new and (pool.missing or unheard):
        return _beside_a_gap(pool, unheard=unheard, policy=policy, now=now)
    if pool.slow and not pool.joining and not is_rolling_out:
        return _without_slow(pool, needs=needs)
    return _growing(pool, is_rolling_out=is_rolling_out, policy=policy, now=now)


def _is_late(joining: EpochCandidate, *, policy: Policy, now: float) -> bool:
    return now - joining.since_s >= policy.join_timeout_s


def _without_late(
    pool: _Workers, *, needs: ExpertNeeds, policy: Policy, now: float
) -> EpochDecision:
    """Some ranks do not serve in time, whatever they wait for."""
    late = [one for one in pool.joining if _is_late(one, policy=policy, now=now)]
    in_time = [one for one in pool.joining if not _is_late(one, policy=policy, now=now)]
    others = [*pool.free, *in_time, *pool.serving, *pool.slow]
    reason = f"{_names(late)} did not serve within {policy.join_timeout_s:g} s"
    if not needs.are_met(_places(others)):
        return _open(pool, f"{reason}, but all are needed", timeout="join")
    return EpochDecision(
        workers=tuple(one.name for one in others),
        left_out=tuple(one.name for one in late),
        reason=reason,
        timeout="join",
    )


def _after_a_loss(
    pool: _Workers, *, needs: ExpertNeeds, policy: Policy, now: float
) -> EpochDecision:
    """The group is lost for some: the others will notice, or are left out if not needed.

    Most ranks are right: if they still serve, those that lost the group are left out instead.
    """
    waited_s = now - min(candidate.since_s for candidate in pool.survivor)
    why = _faults(pool.missing) or pool.survivor[0].reason
    if waited_s < policy.reform_timeout_s:
        return EpochDecision(
            reason=f"the group was lost ({why}): waiting for {_names(pool.bound)} to leave it, "
            f"at most {policy.reform_timeout_s:g} s"
        )
    others = [*pool.new, *pool.bound]
    can_continue = not pool.joining and needs.are_met(_places(others))
    if len(pool.survivor) < len(pool.bound) and can_continue:
        return EpochDecision(
            workers=tuple(candidate.name for candidate in others),
            left_out=tuple(candidate.name for candidate in pool.survivor),
            reason=f"{_names(pool.survivor)} lost the group ({why}), but {_names(pool.bound)} "
            f"still serve in it after {policy.reform_timeout_s:g} s and continue alone",
            timeout="reform",
            is_disputed=True,
        )
    if len(pool.survivor) < len(pool.joining) and not (pool.serving or pool.slow):
        # Most ranks still wait for their group: they have none to leave, and do not hang.
        return _open(pool, f"the group was lost: {why}, before other ranks served")
    reason = (
        f"the group was lost: {why}; {_names(pool.bound)} did not leave it within "
        f"{policy.reform_timeout_s:g} s"
    )
    if not needs.are_met(_places(pool.free)):
        return _open(pool, f"{reason}, but all are needed", timeout="reform")
    return EpochDecision(
        workers=tuple(candidate.name for candidate in pool.free),
        left_out=tuple(candidate.name for candidate in pool.bound),
        reason=reason,
        timeout="reform",
    )


def _beside_a_gap(
    pool: _Workers, *, unheard: frozenset[str], policy: Policy, now: float
) -> EpochDecision:
    """A rank is gone but its peers have not reported the loss of their group.

    Perhaps only its stream failed and it will return; perhaps the peers are about to notice.
    """
    came_s = _latest_s(pool.new, settle_s=policy.reform_timeout_s)
    waited_s = now - max((came_s, *(candidate.since_s for candidate in pool.missing)))
    unknown = [f"{name} has not connected yet" for name in sorted(unheard)]
    faults = "; ".join(filter(None, (_faults(pool.missing), few(unknown, "; "))))
    if waited_s < policy.reform_timeout_s:
        return EpochDecision(
            reason=f"{_names(pool.new)} waits for a rank: {faults}; the others have "
            f"{policy.reform_timeout_s:g} s to notice"
        )
    return _open(pool, f"{_names(pool.new)} joins; {faults}", timeout="reform")


def _without_quarantined(pool: _Workers, *, needs: ExpertNeeds) -> EpochDecision | None:
    """Some ranks have wrong bytes: the others continue at once. None if there are none."""
    if not pool.quarantined:
        return None
    others = [*pool.free, *pool.bound]
    why = few([f"{candidate.name}: {candidate.reason}" for candidate in pool.quarantined], "; ")
    if lack := needs.lack(_places(others)):
        return EpochDecision(
            reason=f"the {len(others)} workers that are not quarantined do not suffice ({lack})",
            is_down=True,
        )
    return EpochDecision(
        workers=tuple(candidate.name for candidate in others),
        left_out=tuple(candidate.name for candidate in pool.quarantined),
        reason=f"continues without quarantined workers: {why}",
    )


def _without_slow(pool: _Workers, *, needs: ExpertNeeds) -> EpochDecision:
    """The group is complete, but some workers are slow: continue without them if possible."""
    others = [*pool.new, *pool.serving]
    why = few([f"{candidate.name}: {candidate.reason}" for candidate in pool.slow], "; ")
    if not needs.are_met(_places(others)):
        return EpochDecision(reason=f"slow, but needed for all experts to have slots: {why}")
    return EpochDecision(
        workers=tuple(candidate.name for candidate in others),
        left_out=tuple(candidate.name for candidate in pool.slow),
        reason=f"continues without slow workers: {why}",
    )


def _growing(pool: _Workers, *, is_rolling_out: bool, policy: Policy, now: float) -> EpochDecision:
    """The group is complete; new workers are added at a good moment."""
    if not pool.new:
        return EpochDecision()
    newest_s = _latest_s(pool.new, settle_s=policy.join_settle_s)
    if pool.joining:
        when = f"when {_names(pool.joining)} serves"
    elif is_rolling_out:
        when = "when the rollout is over"
    elif now - newest_s < policy.join_settle_s:
        when = "shortly"
    else:
        return _open(pool, f"{_names(pool.new)} joins")
    return EpochDecision(reason=f"{_names(pool.new)} joins {when}")


def _latest_s(new: list[EpochCandidate], *, settle_s: float) -> float:
    """When the latest new worker came, as far as the first ones wait for it."""
    first_s = min(candidate.since_s for candidate in new)
    latest_s = max(candidate.since_s for candidate in new)
    return min(latest_s, first_s + (_MOST_SETTLES - 1) * settle_s)


def _open(pool: _Workers, reason: str, *, timeout: str = "") -> EpochDecision:
    return EpochDecision(
        workers=tuple(candidate.name for candidate in (*pool.free, *pool.bound)),
        reason=reason,
        timeout=timeout,
    )


def _faults(candidates: list[EpochCandidate]) -> str:
    return few(
        [f"{candidate.name} is {candidate.state}: {candidate.reason}" for candidate in candidates],
        "; ",
    )


def _places(candidates: Sequence[EpochCandidate]) -> list[int]:
    return [candidate.num_places for candidate in candidates]


def _names(candidates: Sequence[EpochCandidate]) -> str:
    return few(sorted(candidate.name for candidate in candidates))


def few(items: Sequence[str], separator: str = ", ") -> str:
    """The first of `items`, and how many others there are, so that a reason stays readable."""
    others = len(items) - _MAX_NAMED
    return separator.join(items[:_MAX_NAMED]) + (f" and {others} more" if others > 0 else "")

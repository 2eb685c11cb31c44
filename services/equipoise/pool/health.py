"""A pool's health, and the reason for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.membership import EpochDecision, few
from equipoise.pool.member import Member
from equipoise.pool.members import Roster


class Health(StrEnum):
    """A pool's health."""

    WAITING = "waiting"
    """Fewer workers than ranks, or they still load their experts, or all stopped in order."""

    SERVING = "serving"
    """All intended ranks serve."""

    DOWN = "down"
    """The workers that are connected, if any are, have too few slots for all experts, and do not
    serve."""

    DEGRADED = "degraded"
    """A rank is missing, or something is wrong; the rest may still serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Health with its reason, which is empty for SERVING."""

    health: Health
    reason: str


def diagnose(
    roster: Roster,
    *,
    opening: EpochDecision,
    silent: Mapping[int, str],
    left_out: Mapping[str, str],
    quarantined: Mapping[str, str],
    faults: Sequence[str],
    store_fault: str,
) -> Diagnosis:
    """Judge a pool.

    `opening` is the latest decision about the next epoch. `silent` (by rank), `left_out` and
    `quarantined` (by worker), `faults` and `store_fault` are messages.
    """
    left = [f"{name} gets no rank: {reason}" for name, reason in left_out.items()]
    wrong = [f"{name} is quarantined: {reason}" for name, reason in quarantined.items()]
    odd = [few(one, "; ") for one in (left, wrong) if one]
    if opening.is_down:
        # Ranks that serve on include quarantined ones that the others need.
        what = "all ranks serve on, perhaps with wrong experts: " if roster.complete else ""
        health = Health.DEGRADED if roster.complete else Health.DOWN
        return Diagnosis(health=health, reason="; ".join([what + opening.reason, *odd]))
    if roster.epoch == 0 or not roster.seated():
        waiting = opening.reason or ("" if odd else "no worker is connected")
        waits = [waiting, _outvoted(roster), *odd]
        return Diagnosis(health=Health.WAITING, reason="; ".join(filter(None, waits)))
    if not any(member.connected for member in roster.members.values()):
        gone = few([_absence(member) for member in roster.seated()], "; ")
        health = Health.DOWN if roster.intended_ranks else Health.WAITING
        reason = f"no worker is connected: {gone}"
        return Diagnosis(health=health, reason="; ".join(filter(None, [reason, store_fault])))
    troubles = [
        few([_absence(member) for member in roster.seated() if not member.connected], "; "),
        opening.reason,
        few(list(silent.values()), "; "),
        *odd,
        *_shortfall(roster),
        *faults,
        store_fault,
    ]
    if any(troubles):
        return Diagnosis(health=Health.DEGRADED, reason="; ".join(filter(None, troubles)))
    if roster.complete:
        return Diagnosis(health=Health.SERVING, reason="")
    loading = [member.name for member in roster.seated() if not member.serving]
    what = f"{few(loading)} to load experts" if loading else "the other ranks of the epoch"
    return Diagnosis(health=Health.WAITING, reason=f"waiting for {what}")


def _absence(member: Member) -> str:
    return f"rank {member.rank} ({member.name}) is gone: {member.gone_reason}"


def _shortfall(roster: Roster) -> Sequence[str]:
    """Why the epoch has fewer ranks than intended; empty if it has not."""
    intended = roster.intended_ranks
    if roster.num_ranks >= intended:
        return ()
    absent = intended - sum(member.connected for member in roster.members.values())
    remedy = (
        f": start {absent} more {'worker' if absent == 1 else 'workers'}, or restart the others "
        f"with --num-ranks={roster.num_ranks}"
    )
    shortfall = f"{roster.num_ranks} of {intended} ranks" + (remedy if absent > 0 else "")
    return tuple(filter(None, [shortfall, _outvoted(roster)]))


def _outvoted(roster: Roster) -> str:
    """Which workers alone expect as many ranks as the pool waits for; empty if all do."""
    intended = roster.intended_ranks
    expected = {one.name: one.hello.num_ranks for one in roster.members.values() if one.connected}
    most = sorted(name for name, num_ranks in expected.items() if num_ranks == intended)
    others = {num_ranks for num_ranks in expected.values() if num_ranks != intended}
    if not others:
        return ""
    return (
        f"{len(most)} of {len(expected)} workers ({few(most)}) expect {intended} ranks, the others "
        f"{max(others)} at most: start all workers with the same --num-ranks"
    )

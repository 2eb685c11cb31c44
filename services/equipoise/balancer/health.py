"""The one word that an operator looks for, and why it is not the good one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.balancer.roster import Member, Roster


class Health(StrEnum):
    """A pool's state in a word."""

    WAITING = "waiting"
    """Fewer workers than ranks, or they still load their experts."""

    SERVING = "serving"
    """All ranks serve."""

    DEGRADED = "degraded"
    """Something is missing or wrong; the rest may serve on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Health with its reason, which is empty for SERVING."""

    health: Health
    reason: str


def diagnose(
    roster: Roster, *, silent: Mapping[int, str], faults: Sequence[str], store_fault: str
) -> Diagnosis:
    """Judge a pool. `silent` is by rank; it, `faults` and `store_fault` are troubles in words."""
    if roster.epoch == 0 or not roster.seated():
        return Diagnosis(health=Health.WAITING, reason=_waiting_for_workers(roster))
    troubles = [
        *(_absence(member) for member in roster.seated() if not member.connected),
        *_restarted(roster),
        *silent.values(),
        *faults,
        *([store_fault] if store_fault else []),
    ]
    if troubles:
        return Diagnosis(health=Health.DEGRADED, reason="; ".join(troubles))
    loading = [member.name for member in roster.seated() if not member.serving]
    if loading:
        return Diagnosis(
            health=Health.WAITING, reason=f"waiting for {', '.join(loading)} to load experts"
        )
    if not roster.complete:
        return Diagnosis(health=Health.WAITING, reason=_waiting_for_workers(roster))
    return Diagnosis(health=Health.SERVING, reason="")


def _waiting_for_workers(roster: Roster) -> str:
    here = [member.name for member in roster.members.values() if member.connected]
    if roster.shape is None or not here:
        return "no worker is connected"
    missing = roster.shape.num_ranks - len(here)
    return (
        f"{len(here)} of {roster.shape.num_ranks} workers are connected "
        f"({', '.join(sorted(here))}): waiting for {missing} more"
    )


def _absence(member: Member) -> str:
    return f"rank {member.rank} ({member.name}) is gone: {member.gone_reason}"


def _restarted(roster: Roster) -> list[str]:
    """Workers without a rank beside others with one: a group of ranks cannot take them in."""
    return [
        f"worker {member.name} waits for a rank: ranks are dealt anew when all workers of the pool "
        f"have restarted"
        for member in roster.waiting()
    ]

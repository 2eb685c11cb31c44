"""The one word that an operator looks for, and why it is not the good one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.planning.membership import EpochDecision
from equipoise.pool.members import Member, Roster


class Health(StrEnum):
    """A pool's state in a word."""

    WAITING = "waiting"
    """Fewer workers than ranks, or they still load their experts."""

    SERVING = "serving"
    """All ranks serve."""

    DOWN = "down"
    """The workers that are here have too few slots for all experts."""

    DEGRADED = "degraded"
    """Something is missing or wrong; the rest may serve on."""


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
    faults: Sequence[str],
    store_fault: str,
) -> Diagnosis:
    """Judge a pool. `silent` is by rank; it, `faults` and `store_fault` are troubles in words.

    `opening` is the latest decision about the next epoch.
    """
    if opening.is_down:
        return Diagnosis(health=Health.DOWN, reason=opening.reason)
    if roster.epoch == 0 or not roster.seated():
        return Diagnosis(health=Health.WAITING, reason=opening.reason or "no worker is connected")
    troubles = [
        *(_absence(member) for member in roster.seated() if not member.connected),
        *([opening.reason] if opening.reason else []),
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
        return Diagnosis(health=Health.WAITING, reason="waiting for the other ranks of the epoch")
    return Diagnosis(health=Health.SERVING, reason="")


def _absence(member: Member) -> str:
    return f"rank {member.rank} ({member.name}) is gone: {member.gone_reason}"

"""Who counts as a member of a pool, by when each was heard last."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Ranks that count, ascending, and for each one that does not, why."""

    alive: tuple[int, ...]
    silent: Mapping[int, str]


def alive(last_heard_s: Mapping[int, float], *, now: float, silent_after_s: float) -> Liveness:
    """Tell ranks heard within the last `silent_after_s` from those that fell silent.

    `last_heard_s` has the time of the last word of each rank, on the clock of `now`.
    """
    silent = {
        rank: f"rank {rank} has been silent for {now - heard_s:.1f} s, "
        f"more than the {silent_after_s:g} s allowed"
        for rank, heard_s in sorted(last_heard_s.items())
        if now - heard_s > silent_after_s
    }
    return Liveness(
        alive=tuple(rank for rank in sorted(last_heard_s) if rank not in silent), silent=silent
    )

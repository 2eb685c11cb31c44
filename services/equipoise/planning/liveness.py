"""Which ranks of a pool are alive, by the time of their last message."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Ranks that are alive, and those that are not."""

    alive: tuple[int, ...]
    """Ascending."""
    silent: Mapping[int, str]
    """The reason for each silent rank."""


def alive(last_heard_s: Mapping[int, float], *, now: float, silent_after_s: float) -> Liveness:
    """Separate ranks heard within the last `silent_after_s` from silent ones.

    `last_heard_s` is the time of each rank's last message, on the clock of `now`.
    """
    silent = {
        rank: f"rank {rank} has been silent for {now - heard_s:.1f} s, "
        f"more than the allowed {silent_after_s:g} s"
        for rank, heard_s in sorted(last_heard_s.items())
        if now - heard_s > silent_after_s
    }
    return Liveness(
        alive=tuple(rank for rank in sorted(last_heard_s) if rank not in silent), silent=silent
    )

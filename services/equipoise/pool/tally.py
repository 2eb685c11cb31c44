"""`Tally`: what has happened to a pool since the balancer leads, counted for metrics."""

from collections import Counter
from dataclasses import dataclass, field

from equipoise.planning.expected_gain import GainOutcome
from equipoise.planning.rollout import State
from equipoise.telemetry.histogram import LONG_S, SHORT_S, Histogram
from equipoise.wire.messages import Staged

PASSING = (State.PLANNED, State.STAGING, State.STAGED, State.SWITCHED)
"""States that a wave passes through, and so lasts in."""


def _of_states() -> dict[State, Histogram]:
    return {state: Histogram(LONG_S) for state in PASSING}


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counters that only grow. Durations are in seconds.

    `moves` are those of waves that all ranks switched to, `peer_bytes` and `checkpoint_bytes` what
    ranks pulled for any. `promises` counts what became of them.
    """

    accepted: int = 0
    declined: int = 0
    shifts: int = 0
    waves: int = 0
    moves: int = 0
    peer_bytes: int = 0
    checkpoint_bytes: int = 0
    rolled_back: int = 0
    slow_found: int = 0
    promises: Counter[GainOutcome] = field(default_factory=Counter)
    plan_s: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    wave_s: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    stall_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    state_s: dict[State, Histogram] = field(default_factory=_of_states)

    def decided(self, *, accepted: bool, plan_s: float) -> None:
        """A verdict was given on a plan that took `plan_s`."""
        self.accepted += accepted
        self.declined += not accepted
        self.plan_s.observe(plan_s)

    def left(self, state: State, *, after_s: float) -> None:
        """A wave left a state that it was in for `after_s`."""
        if state in self.state_s:
            self.state_s[state].observe(max(0.0, after_s))

    def pulled(self, staged: Staged) -> None:
        """A rank has staged a wave."""
        self.peer_bytes += staged.peer_bytes
        self.checkpoint_bytes += staged.checkpoint_bytes

    def switched(self, *, moves: int, wave_s: float, stall_s: float) -> None:
        """All ranks told of their switch, the longest of which took `stall_s`."""
        self.waves += 1
        self.moves += moves
        self.wave_s.observe(max(0.0, wave_s))
        self.stall_s.observe(stall_s)

"""`Rollouts`: the waves of a pool's plan, one at a time, and what came of them.

Which event leads where is the table in `planning/rollout.py`; here is the chain of waves around it
and what people are told about it. It sends and stores nothing: it returns the table's commands.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.planning.change import LayoutChange
from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Commands, Event, Rollout, State
from equipoise.pool.tally import Tally
from equipoise.wire.messages import Switched

MAX_SWITCHES = 32
"""Switches kept for people to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord:
    """What the ranks told about one switch. `median_step_us` is of the rank that stalled longest.

    `staging_s` is from the first Stage to the last Staged, `time_s` when the last rank reported.
    """

    generation: int
    step: int
    max_stall_us: int
    median_step_us: int
    moves: int
    staging_s: float
    time_s: float


@dataclass(slots=True, kw_only=True)
class _Wave:
    """A wave and, for its record, when it was staged and what ranks told of its switch."""

    rollout: Rollout
    began_s: float
    staged_s: float | None = None
    switches: dict[int, Switched] = field(default_factory=dict)

    @property
    def moves(self) -> int:
        before, after = self.rollout.base.expert_of_slot, self.rollout.target.expert_of_slot
        return int(np.count_nonzero(before != after))


class Rollouts:
    """At most one wave is under way; an aborted one takes those behind it along.

    `completed` and `aborted` count plans, not waves, since the balancer started.
    """

    def __init__(self, policy: Policy, *, tally: Tally | None = None) -> None:
        self._policy = policy
        self._tally = tally or Tally()
        self._wave: _Wave | None = None
        self._waves: Sequence[LayoutChange] = ()
        self._num_begun = 0
        self.is_at_first = True
        """Whether the latest wave is the one with which its plan began."""
        self.completed = 0
        self.aborted = 0
        self.last_switch_s: float | None = None
        self.switches: deque[SwitchRecord] = deque(maxlen=MAX_SWITCHES)

    @property
    def current(self) -> Rollout | None:
        """The wave under way, or None; the next one begins as soon as it is active."""
        if self._wave is None or self._wave.rollout.is_over:
            return None
        return self._wave.rollout

    @property
    def latest(self) -> Rollout | None:
        """The wave under way or, if none is, the one that was last."""
        return self._wave.rollout if self._wave is not None else None

    @property
    def moves(self) -> int:
        """Slots that the latest wave changes, over all layers and ranks."""
        return self._wave.moves if self._wave is not None else 0

    @property
    def waves_left(self) -> int:
        """Waves behind the current one."""
        return len(self._waves) - self._num_begun

    def start(self, waves: Sequence[LayoutChange], *, base: Layout, now: float) -> Commands:
        """Begin the first of `waves`: each leads to a valid layout, the last one to the goal."""
        assert self.current is None, "one plan at a time"
        self._waves, self._num_begun = waves, 0
        self.is_at_first = True
        return self._begin_next(base, now=now)

    def resume(self, rollout: Rollout, *, now: float) -> None:
        """Take over a wave of an earlier balancer where the ranks say it is."""
        assert self.current is None, "one plan at a time"
        self._wave = _Wave(rollout=rollout, began_s=now)

    def abandon(self) -> None:
        """Forget everything under way, because the ranks it was for are no more."""
        if self.current is not None:
            self.aborted += 1
        self._wave = None
        self._waves, self._num_begun = (), 0

    def adopt(self, policy: Policy) -> None:
        """Later waves have the bounds of `policy`; the one under way keeps its own."""
        self._policy = policy

    def handle(self, event: Event, *, now: float) -> Commands:
        """Let the table decide; the next wave begins when this one became active."""
        wave = self._wave
        if wave is None:
            return ()
        before = wave.rollout
        wave.rollout, commands = before.step(event, now=now)
        after = wave.rollout
        if before.state is not after.state:
            self._tally.left(before.state, after_s=now - before.entered_s)
        if before.state is State.PLANNED and after.state is not State.PLANNED:
            wave.began_s = now
        if wave.staged_s is None and len(after.staged_ranks) == after.num_ranks:
            wave.staged_s = now
        if before.state is State.ABORTED and after.state is not State.ABORTED:
            # A switch crossed the abort; the ranks are right.
            self.aborted -= 1
        elif before.state is not State.ABORTED and after.state is State.ABORTED:
            self.aborted += 1
            self._waves, self._num_begun = (), 0
        if before.state is after.state or after.state is not State.ACTIVE:
            return commands
        if self.waves_left:
            self.is_at_first = False
            return (*commands, *self._begin_next(after.target, now=now))
        self.completed += 1
        return commands

    def note_switch(self, switched: Switched, *, now: float) -> None:
        """Remember what a rank told about a switch, whatever becomes of the rollout."""
        wave = self._wave
        if (
            wave is None
            or switched.generation != wave.rollout.target.generation
            or switched.rank in wave.switches
        ):
            return
        wave.switches[switched.rank] = switched
        if len(wave.switches) < wave.rollout.num_ranks:
            return
        slowest = max(wave.switches.values(), key=lambda switch: switch.stall_us)
        staged_s = now if wave.staged_s is None else wave.staged_s
        self.last_switch_s = now
        self._tally.switched(
            moves=wave.moves, wave_s=now - wave.began_s, stall_s=slowest.stall_us / 1e6
        )
        self.switches.appendleft(
            SwitchRecord(
                generation=switched.generation,
                step=switched.step,
                max_stall_us=slowest.stall_us,
                median_step_us=slowest.median_step_us,
                moves=wave.moves,
                staging_s=staged_s - wave.began_s,
                time_s=now,
            )
        )

    def _begin_next(self, base: Layout, *, now: float) -> Commands:
        wave = self._waves[self._num_begun]
        self._num_begun += 1
        if not self.waves_left:  # Nobody needs their block of arrays any more.
            self._waves, self._num_begun = (), 0
        rollout, commands = Rollout.begin(
            base=base,
            target=wave.applied_to(base),
            num_ranks=base.num_ranks,
            policy=self._policy,
            now=now,
        )
        self._wave = _Wave(rollout=rollout, began_s=now)
        return commands

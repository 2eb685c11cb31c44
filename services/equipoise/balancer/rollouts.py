"""`Rollouts`: the waves of a pool's plan, one at a time, and what came of them.

Which event leads where is the table in `planning/rollout.py`; here is the chain of waves around it
and what people are told about it. It sends and stores nothing: it returns the table's commands.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Command, Event, Rollout, State
from equipoise.wire.messages import Switched

MAX_SWITCHES = 32
"""Switches kept for people to read."""

_OPEN_STATES = {State.PLANNED, State.STAGING, State.STAGED, State.SWITCHED}


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
    """A wave under way; the reports of a switch are collected for its record."""

    rollout: Rollout
    base: Layout
    target: Layout
    began_s: float
    staged_s: float | None = None
    switches: dict[int, Switched]

    @property
    def moves(self) -> int:
        return int(np.count_nonzero(self.base.expert_of_slot != self.target.expert_of_slot))


class Rollouts:
    """At most one wave is under way; an aborted one takes those behind it along."""

    def __init__(self, *, num_ranks: int, policy: Policy) -> None:
        self._num_ranks = num_ranks
        self._policy = policy
        self._wave: _Wave | None = None
        self._waiting: deque[Layout] = deque()
        self.completed = 0
        self.aborted = 0
        self.last_abort = ""
        self.last_switch_s: float | None = None
        self.switches: deque[SwitchRecord] = deque(maxlen=MAX_SWITCHES)

    @property
    def in_progress(self) -> bool:
        """Whether a wave is under way or waits for its turn."""
        return bool(self._waiting) or self._is_open

    @property
    def current(self) -> Rollout | None:
        """The wave under way, if one is."""
        return self._wave.rollout if self._wave is not None and self._is_open else None

    @property
    def target(self) -> Layout | None:
        """The layout last rolled out, also when its rollout has ended since."""
        return self._wave.target if self._wave is not None else None

    @property
    def moves(self) -> int:
        """Slots that the latest wave changes, over all layers and ranks."""
        return self._wave.moves if self._wave is not None else 0

    @property
    def waves_left(self) -> int:
        return len(self._waiting)

    def plan(self, waves: tuple[Layout, ...], *, base: Layout, now: float) -> tuple[Command, ...]:
        """Start with the first of `waves`, each complete and valid, the last one the goal."""
        assert not self.in_progress, "one plan at a time"
        self._waiting = deque(waves)
        return self._begin_next(base, now=now)

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        """Let the table decide on an event; starts the next wave when this one became active."""
        if self._wave is None:
            return ()
        wave = self._wave
        was_open = self._is_open
        wave.rollout, commands = wave.rollout.step(event, now=now)
        if wave.staged_s is None and len(wave.rollout.staged_ranks) == self._num_ranks:
            wave.staged_s = now
        if not was_open:
            return tuple(commands)
        if wave.rollout.state is State.ABORTED:
            self.aborted += 1
            self.last_abort = wave.rollout.reason
            self._waiting.clear()
        elif wave.rollout.state is State.ACTIVE:
            return (*commands, *self._advance(now=now))
        return tuple(commands)

    def note_switch(self, switched: Switched, *, now: float) -> None:
        """Remember what a rank told about a switch, whatever becomes of the rollout."""
        wave = self._wave
        if wave is None or switched.generation != wave.target.generation:
            return
        wave.switches[switched.rank] = switched
        if len(wave.switches) < self._num_ranks:
            return
        slowest = max(wave.switches.values(), key=lambda switch: switch.stall_us)
        staged_s = now if wave.staged_s is None else wave.staged_s
        self.last_switch_s = now
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

    def drop_waiting(self) -> None:
        """Forget the waves that have not begun."""
        self._waiting.clear()

    @property
    def _is_open(self) -> bool:
        return self._wave is not None and self._wave.rollout.state in _OPEN_STATES

    def _advance(self, *, now: float) -> tuple[Command, ...]:
        assert self._wave is not None
        if self._waiting:
            return self._begin_next(self._wave.target, now=now)
        self.completed += 1
        return ()

    def _begin_next(self, base: Layout, *, now: float) -> tuple[Command, ...]:
        target = self._waiting.popleft()
        rollout, commands = Rollout.begin(
            base=base, target=target, num_ranks=self._num_ranks, policy=self._policy, now=now
        )
        self._wave = _Wave(rollout=rollout, base=base, target=target, began_s=now, switches={})
        return tuple(commands)

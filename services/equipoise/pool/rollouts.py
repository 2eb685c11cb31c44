"""`Rollouts`: the waves of a pool's plan, one at a time, and the commands that carry them out.

Which event leads where is the table in `planning/rollout.py`; this is the chain of waves around it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from equipoise.planning.arrays import Indices
from equipoise.planning.change import LayoutChange
from equipoise.planning.costs import MeasuredWave
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.moves import moves_into
from equipoise.planning.rollout import (
    Commands,
    DeadlineCheck,
    Event,
    PersistCommitted,
    PersistProposed,
    RankRejected,
    RankRuns,
    SendAbort,
    SendStage,
    State,
    Wave,
)
from equipoise.planning.setbacks import Setbacks
from equipoise.pool.counters import Counters
from equipoise.pool.effects import (
    Chain,
    Effect,
    Send,
    WriteCommitted,
    WriteDecision,
    WriteProposed,
)
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.members import Roster
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import DecisionRecord
from equipoise.pool.verification import Verification
from equipoise.wire.balancer_messages import Abort, Stage
from equipoise.wire.messages import Switched

MAX_SWITCHES = 32
"""Switches kept for status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord:
    """What the ranks reported about one switch."""

    generation: int
    """Generation that they switched to."""

    step: int
    """Step at which they switched."""

    max_stall_us: int
    """Longest stall of a rank, microseconds."""

    median_step_us: int
    """Median step of that rank, microseconds."""

    moves: int
    """Slots that changed."""

    most_moves: int
    """Those of the rank with the most."""

    staging_s: float
    """Seconds from the first Stage to the last Staged."""

    time_s: float
    """When the last rank reported."""


@dataclass(slots=True, kw_only=True)
class _TrackedWave:
    """A wave and, for its record, when it was staged and what ranks reported of its switch."""

    wave: Wave
    began_s: float
    staged_s: float | None = None
    switches: dict[int, Switched] = field(default_factory=dict)

    @property
    def moves(self) -> int:
        return int(self.moves_of_rank().sum())

    def moves_of_rank(self) -> Indices:
        """Slots that change their expert, [ranks]."""
        base, target = self.wave.base, self.wave.target
        moved = is_moved(base.expert_of_slot, target.expert_of_slot).sum(axis=0)
        return np.add.reduceat(moved, target.first_slot[:-1])

    def step(self, event: Event, *, now: float) -> Commands:
        """Let the table decide."""
        before = self.wave
        self.wave, commands = before.step(event, now=now)
        if before.state is State.PLANNED and self.wave.state is not State.PLANNED:
            self.began_s = now
        if self.staged_s is None and len(self.wave.staged_ranks) == self.wave.num_ranks:
            self.staged_s = now
        return commands

    def note_switch(self, switched: Switched) -> None:
        """Keep a rank's report of the switch."""
        self.switches[switched.rank] = switched


class Rollouts:
    """At most one wave is in progress; when it aborts, the waves after it are dropped."""

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        roster: Roster,
        layouts: PoolLayouts,
        verification: Verification,
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._layouts = layouts
        self._verification = verification
        self._timeouts, self._tally = counters.timeouts, counters.tally
        self._tracked: _TrackedWave | None = None
        # Steps of the latest committed waves of the epoch, by generation.
        self._steps: dict[int, int] = {}
        self._waves: Sequence[LayoutChange] = ()
        self._num_begun = 0
        self._decision: DecisionRecord | None = None
        self._setbacks = Setbacks()
        self.is_at_first = True
        """Whether the latest wave is the first of its plan."""
        self.completed = 0
        """Plans, not waves, that were rolled out to the end."""
        self.aborted = 0
        """Plans, not waves, that were aborted. One whose switch was under way completes all the
        same, and counts as both."""
        self.last_switch_s: float | None = None
        """When the last rank reported the latest switch, or None."""
        self._switches: deque[SwitchRecord] = deque(maxlen=MAX_SWITCHES)

    @property
    def current(self) -> Wave | None:
        """The wave in progress, or None; the next one begins as soon as it is active."""
        if self._tracked is None or self._tracked.wave.is_over:
            return None
        return self._tracked.wave

    @property
    def latest(self) -> Wave | None:
        """The wave in progress or, if none is, the last one."""
        return self._tracked.wave if self._tracked is not None else None

    @property
    def moves(self) -> int:
        """Slots that the latest wave changes, over all layers and ranks."""
        return self._tracked.moves if self._tracked is not None else 0

    @property
    def waves_left(self) -> int:
        """Waves after the current one."""
        return len(self._waves) - self._num_begun

    @property
    def switches(self) -> Sequence[SwitchRecord]:
        """The latest switches, newest first."""
        return self._switches

    def measured_waves(self, *, expert_bytes: int) -> tuple[MeasuredWave, ...]:
        """What the latest waves that staged something cost, newest first."""
        return tuple(
            MeasuredWave(
                most_bytes=one.most_moves * expert_bytes,
                staging_s=one.staging_s,
                stall_s=one.max_stall_us / 1e6,
            )
            for one in self._switches
            if one.most_moves
        )

    def committed_step(self, generation: int) -> int | None:
        """Step at which ranks switched to a generation, if one of the latest waves committed it."""
        return self._steps.get(generation)

    def reported_steps(self, generation: int) -> Mapping[int, int]:
        """The step of every rank's switch to the latest wave; empty until all have reported it."""
        tracked = self._tracked
        if tracked is None or tracked.wave.target.generation != generation:
            return {}
        steps = {rank: switched.step for rank, switched in tracked.switches.items()}
        return steps if len(steps) == tracked.wave.num_ranks else {}

    def must_wait(self, *, now: float) -> str | None:
        """Why nothing is rolled out yet after failed rollouts; None if it may be."""
        return self._setbacks.wait(self._policy.values, now=now)

    def start(
        self,
        waves: Sequence[LayoutChange],
        *,
        base: Layout,
        decision: DecisionRecord,
        now: float,
    ) -> Chain:
        """Begin the first of `waves`: each leads to a valid layout, the last one to the goal.

        If it aborts, `decision` is recorded again as rejected.
        """
        assert self.current is None, "one plan at a time"
        self._decision = decision
        self._waves, self._num_begun = waves, 0
        self.is_at_first = True
        return self._effects(self._begin_next(base, now=now))

    def resume(self, wave: Wave | None, commands: Commands, *, now: float) -> Chain:
        """Take over a wave of an earlier balancer in the state that ranks report, if there is one.

        `commands` follow from that state.
        """
        assert self.current is None, "one plan at a time"
        if wave is not None:
            self._track(wave, now=now)
        return self._effects(commands)

    def begin_epoch(self) -> None:
        """Forget everything in progress: it was for the ranks of the previous epoch."""
        if self.current is not None:
            self.aborted += 1
        self._tracked = None
        self._steps.clear()
        self._waves, self._num_begun = (), 0
        self._setbacks = Setbacks()

    def _note_step(self, wave: Wave) -> None:
        if wave.state in {State.SWITCHED, State.ACTIVE} and wave.switch_step is not None:
            self._steps[wave.target.generation] = wave.switch_step
            for generation in sorted(self._steps)[:-MAX_SWITCHES]:
                del self._steps[generation]

    def handle(self, event: Event, *, now: float) -> Chain:
        """Give the table an event, and carry out its commands."""
        aborted, completed, before = self.aborted, self.completed, self.current
        effects = self._effects(self._step(event, now=now))
        wave = self.latest
        if before is not None and isinstance(event, DeadlineCheck):
            self._timeouts.note_wave(before, wave)
        if self.completed > completed:
            self._setbacks = Setbacks()
        if self.aborted <= aborted or wave is None:
            return effects
        reason = f"generation {wave.target.generation} was aborted: {wave.reason}"
        if isinstance(event, DeadlineCheck) and self._roster.idleness:
            reason += f"; {self._roster.idleness}"
        elif isinstance(event, RankRejected | RankRuns | DeadlineCheck):
            self._setbacks = self._setbacks.one_more(wave.reason, now=now)
        if self._decision is None:
            return effects
        taken_back = replace(self._decision, time_unix_s=now, accepted=False, reason=reason)
        return (*effects, WriteDecision(record=taken_back))

    def note_switch(self, switched: Switched, *, now: float) -> None:
        """Remember what a rank reported about a switch, regardless of the rollout's outcome."""
        tracked = self._tracked
        if (
            tracked is None
            or switched.generation != tracked.wave.target.generation
            or switched.rank in tracked.switches
        ):
            return
        tracked.note_switch(switched)
        if len(tracked.switches) < tracked.wave.num_ranks:
            return
        slowest = max(tracked.switches.values(), key=lambda switch: switch.stall_us)
        staged_s = now if tracked.staged_s is None else tracked.staged_s
        self.last_switch_s = now
        self._tally.note_switch(
            moves=tracked.moves, wave_s=now - tracked.began_s, stall_s=slowest.stall_us / 1e6
        )
        self._switches.appendleft(
            SwitchRecord(
                generation=switched.generation,
                step=switched.step,
                max_stall_us=slowest.stall_us,
                median_step_us=slowest.median_step_us,
                moves=tracked.moves,
                most_moves=int(tracked.moves_of_rank().max()),
                staging_s=staged_s - tracked.began_s,
                time_s=now,
            )
        )

    def _step(self, event: Event, *, now: float) -> Commands:
        """Step the wave; the next one begins when this one becomes active."""
        tracked = self._tracked
        if tracked is None:
            return ()
        before = tracked.wave
        commands = tracked.step(event, now=now)
        after = tracked.wave
        self._note_step(after)
        if before.state is after.state:
            return commands
        self._tally.note_state_left(before.state, after_s=now - before.entered_s)
        if after.state is State.ABORTED:
            self.aborted += 1
            self._waves, self._num_begun = (), 0
        if after.state is not State.ACTIVE:
            return commands
        if self.waves_left:
            self.is_at_first = False
            return (*commands, *self._begin_next(after.target, now=now))
        self.completed += 1
        return commands

    def _begin_next(self, base: Layout, *, now: float) -> Commands:
        change = self._waves[self._num_begun]
        self._num_begun += 1
        if not self.waves_left:  # The last one frees the arrays that all of them share.
            self._waves, self._num_begun = (), 0
        wave, commands = Wave.begin(
            base=base,
            target=change.applied_to(base),
            num_ranks=base.num_ranks,
            policy=self._policy.values,
            now=now,
        )
        self._track(wave, now=now)
        return commands

    def _track(self, wave: Wave, *, now: float) -> None:
        self._tracked = _TrackedWave(wave=wave, began_s=now)
        self._layouts.keep_for_wave(wave.base.generation, wave.target.generation)

    def _effects(self, commands: Commands) -> Chain:
        """What the store writes and each rank is sent, in order."""
        effects: list[Effect] = []
        for command in commands:
            match command:
                case PersistProposed():
                    # Known before any rank is asked to stage it.
                    self._layouts.remember(command.layout)
                    effects.append(WriteProposed(layout=command.layout))
                case SendStage():
                    effects += self._stage(command)
                case PersistCommitted():
                    # All ranks run it: everything starts from it from now on.
                    self._layouts.run(command.layout)
                    effects.append(
                        WriteCommitted(
                            generation=command.layout.generation,
                            previous=self._layouts.stored_generation,
                        )
                    )
                case SendAbort():
                    effects += self._abort(command)
        return tuple(effects)

    def _stage(self, command: SendStage) -> Chain:
        """A Stage for every rank; one without moves still takes part in the agreement."""
        base = self._layouts.get(command.base_generation)
        assert base is not None, "the base of a wave is what ranks run"
        checksums = self._verification.table
        assert checksums is not None, "nothing is planned for ranks that are not verified"
        moves = moves_into(
            base.expert_of_slot,
            command.layout,
            topology=self._roster.topology(),
            checksums=checksums,
        )
        return tuple(
            Send(
                worker=member.name,
                message=Stage(
                    epoch=self._roster.epoch,
                    layout=command.layout,
                    base_generation=base.generation,
                    base=base,
                    moves=moves.get(rank, ()),
                    timeout_s=self._policy.values.stage_timeout_s,
                ),
            )
            for rank, member in enumerate(self._roster.seated())
        )

    def _abort(self, command: SendAbort) -> Chain:
        abort = Abort(
            epoch=self._roster.epoch, generation=command.generation, reason=command.reason
        )
        return tuple(Send(worker=member.name, message=abort) for member in self._roster.seated())

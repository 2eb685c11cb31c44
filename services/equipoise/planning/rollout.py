"""`Wave`: rolls out one generation to all ranks, as a table of states and events.

Pure: an event goes in; the next state of the wave and the commands to carry out come out.

    planned -> staging -> staged -> switched -> active        before a switch -> aborted

Ranks switch by agreement in their own step header, without the balancer. So the first
`RankSwitched` proves that all ranks had staged and that all switch at that step. It overrides what
the balancer assumed, even an abort: once one rank has switched, the wave commits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy


class State(StrEnum):
    """State of a wave."""

    PLANNED = "planned"
    """Being persisted; not yet sent to any rank."""

    STAGING = "staging"
    """Ranks fetch experts into staging memory."""

    STAGED = "staged"
    """Every rank has staged verified bytes; the ranks agree on the step of the switch."""

    SWITCHED = "switched"
    """Ranks run it; it is being persisted as the committed layout."""

    ACTIVE = "active"
    """Ranks run it and it is committed. Final."""

    ABORTED = "aborted"
    """Aborted, with a reason. Final, unless a rank reports that it had already switched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """The store completed the last persist command."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStaged:
    """A rank has staged verified bytes for every slot it changes."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRejected:
    """A rank cannot stage a generation and keeps its current layout."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSwitched:
    """A rank switched to a generation."""

    rank: int
    generation: int
    step: int
    """First step of the new generation."""
    stall_us: int
    """Duration of the switch, microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank disconnected or was silent for too long."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineCheck:
    """Time passed: check the timeouts."""


Event = Persisted | RankStaged | RankRejected | RankSwitched | RankLost | DeadlineCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistProposed:
    """Write the layout to the store as proposed, then report `Persisted`."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStage:
    """Tell every rank to stage the layout on top of `base_generation`."""

    layout: Layout
    base_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistCommitted:
    """Write the layout to the store as the one in use, then report `Persisted`."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    """Tell every rank to drop what it staged of a generation, unless it already switched."""

    generation: int
    reason: str


Command = PersistProposed | SendStage | PersistCommitted | SendAbort
Commands = tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wave:
    """One generation on its way from `base` to `target`."""

    base: Layout
    target: Layout
    num_ranks: int
    policy: Policy
    state: State
    entered_s: float
    """When it entered `state`."""
    staged_ranks: frozenset[int] = frozenset()
    switched_ranks: frozenset[int] = frozenset()
    switch_step: int | None = None
    """Step at which ranks switched; None before."""
    worst_stall_us: int = 0
    """Longest switch of a rank so far, microseconds."""
    reason: str
    """Why it is in `state`."""

    @classmethod
    def begin(
        cls, *, base: Layout, target: Layout, num_ranks: int, policy: Policy, now: float
    ) -> tuple["Wave", Commands]:
        """Begin a wave in `planned`; its layout is persisted before anything else."""
        assert target.generation > base.generation, "generations grow and are never reused"
        wave = cls(
            base=base,
            target=target,
            num_ranks=num_ranks,
            policy=policy,
            state=State.PLANNED,
            entered_s=now,
            reason=f"generation {target.generation} is being persisted",
        )
        return wave, (PersistProposed(layout=target),)

    @property
    def is_over(self) -> bool:
        """Whether it has ended; a late `RankSwitched` can still revive an aborted one."""
        return self.state in {State.ACTIVE, State.ABORTED}

    @property
    def is_faulted(self) -> bool:
        """Whether ranks contradict each other about the switch, which no wave can resolve."""
        return self.state is State.ABORTED and bool(self.switched_ranks)

    def step(self, event: Event, *, now: float) -> tuple["Wave", Commands]:
        """Return the wave after an event, and the commands to carry out in order."""
        generation = getattr(event, "generation", self.target.generation)
        if generation != self.target.generation:
            return self, ()
        return TABLE[self.state, type(event)](self, event, now)


# Handlers: what an event does in the states that the table lists it for. -----------------------


def _ignore(wave: Wave, _event: Event, _now: float) -> tuple[Wave, Commands]:
    return wave, ()


def _stage(wave: Wave, _event: Persisted, now: float) -> tuple[Wave, Commands]:
    waiting = _enter(wave, State.STAGING, now, f"ranks stage generation {wave.target.generation}")
    command = SendStage(layout=wave.target, base_generation=wave.base.generation)
    return waiting, (command,)


def _note_staged(wave: Wave, event: RankStaged, now: float) -> tuple[Wave, Commands]:
    noted = replace(wave, staged_ranks=wave.staged_ranks | {event.rank})
    if len(noted.staged_ranks) < noted.num_ranks:
        return noted, ()
    return _await_switch(noted, now), ()


def _rejected(wave: Wave, event: RankRejected, now: float) -> tuple[Wave, Commands]:
    return _abort_unless_switched(wave, f"rank {event.rank} rejected it: {event.reason}", now)


def _lost(wave: Wave, event: RankLost, now: float) -> tuple[Wave, Commands]:
    return _abort_unless_switched(wave, f"rank {event.rank} was lost: {event.reason}", now)


def _lost_early(wave: Wave, event: RankLost, now: float) -> tuple[Wave, Commands]:
    reason = f"rank {event.rank} was lost before staging began: {event.reason}"
    return _enter(wave, State.ABORTED, now, reason), ()


def _too_long(wave: Wave, _event: DeadlineCheck, now: float) -> tuple[Wave, Commands]:
    """Abort, commit, or retry the commit if the wave has been in its state for too long."""
    policy, everyone = wave.policy, set(range(wave.num_ranks))
    is_staged = wave.state in {State.STAGED, State.SWITCHED}
    timeout_s = policy.switch_timeout_s if is_staged else policy.stage_timeout_s
    if now - wave.entered_s < timeout_s:
        return wave, ()
    if wave.state is State.PLANNED:
        reason = f"it did not get its turn, or the store did not persist it, within {timeout_s:g} s"
        return _enter(wave, State.ABORTED, now, reason), ()
    if wave.state is State.SWITCHED:  # Ranks already run the layout: it cannot be undone.
        reason = (
            f"generation {wave.target.generation} is in use, but the store did not confirm it "
            f"within {timeout_s:g} s; retrying"
        )
        return _commit(wave, now, reason)
    missing = everyone - (wave.switched_ranks if is_staged else wave.staged_ranks)
    what = "report the switch" if is_staged else "stage"
    cause = f"{_names(missing)} did not {what} within {timeout_s:g} s"
    return _abort_unless_switched(wave, cause, now)


def _note_switched(wave: Wave, event: RankSwitched, now: float) -> tuple[Wave, Commands]:
    if wave.is_faulted:
        return wave, ()
    if wave.switch_step is not None and event.step != wave.switch_step:
        reason = (
            f"ranks contradict each other: rank {event.rank} switched to generation "
            f"{event.generation} at step {event.step}, {_names(wave.switched_ranks)} at step "
            f"{wave.switch_step}; restart the pool"
        )
        return _enter(wave, State.ABORTED, now, reason), ()
    noted = replace(
        wave,
        switched_ranks=wave.switched_ranks | {event.rank},
        switch_step=event.step,
        worst_stall_us=max(wave.worst_stall_us, event.stall_us),
    )
    if wave.state in {State.SWITCHED, State.ACTIVE}:
        return noted, ()
    if len(noted.switched_ranks) == noted.num_ranks:
        return _commit(noted, now, f"all ranks switched at step {event.step}")
    if wave.state is not State.STAGED:  # This proves that all ranks had staged.
        noted = replace(noted, staged_ranks=frozenset(range(noted.num_ranks)))
        return _await_switch(noted, now), ()
    return noted, ()


def _commit_done(wave: Wave, _event: Persisted, now: float) -> tuple[Wave, Commands]:
    reason = f"generation {wave.target.generation} is in use and committed"
    return _enter(wave, State.ACTIVE, now, reason), ()


# Shared by handlers. -----------------------------------------------------------------------------


def _abort_unless_switched(wave: Wave, cause: str, now: float) -> tuple[Wave, Commands]:
    if wave.switched_ranks:
        cause += f"; but {_names(wave.switched_ranks)} switched, and ranks switch together"
        return _commit(wave, now, cause)
    command = SendAbort(generation=wave.target.generation, reason=cause)
    return _enter(wave, State.ABORTED, now, cause), (command,)


def _commit(wave: Wave, now: float, reason: str) -> tuple[Wave, Commands]:
    return _enter(wave, State.SWITCHED, now, reason), (PersistCommitted(layout=wave.target),)


def _await_switch(wave: Wave, now: float) -> Wave:
    return _enter(wave, State.STAGED, now, "all ranks have staged and switch at their next step")


def _enter(wave: Wave, state: State, now: float, reason: str) -> Wave:
    return replace(wave, state=state, entered_s=now, reason=reason)


def _names(ranks: set[int] | frozenset[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


_Handler = Callable[[Wave, Any, float], tuple[Wave, Commands]]

TABLE: dict[tuple[State, type[Event]], _Handler] = {
    (State.PLANNED, Persisted): _stage,
    (State.PLANNED, RankStaged): _ignore,
    (State.PLANNED, RankRejected): _ignore,
    (State.PLANNED, RankSwitched): _note_switched,
    (State.PLANNED, RankLost): _lost_early,
    (State.PLANNED, DeadlineCheck): _too_long,
    (State.STAGING, Persisted): _ignore,
    (State.STAGING, RankStaged): _note_staged,
    (State.STAGING, RankRejected): _rejected,
    (State.STAGING, RankSwitched): _note_switched,
    (State.STAGING, RankLost): _lost,
    (State.STAGING, DeadlineCheck): _too_long,
    (State.STAGED, Persisted): _ignore,
    (State.STAGED, RankStaged): _ignore,
    (State.STAGED, RankRejected): _rejected,
    (State.STAGED, RankSwitched): _note_switched,
    (State.STAGED, RankLost): _lost,
    (State.STAGED, DeadlineCheck): _too_long,
    (State.SWITCHED, Persisted): _commit_done,
    (State.SWITCHED, RankStaged): _ignore,
    (State.SWITCHED, RankRejected): _ignore,
    (State.SWITCHED, RankSwitched): _note_switched,
    (State.SWITCHED, RankLost): _ignore,
    (State.SWITCHED, DeadlineCheck): _too_long,
    (State.ACTIVE, Persisted): _ignore,
    (State.ACTIVE, RankStaged): _ignore,
    (State.ACTIVE, RankRejected): _ignore,
    (State.ACTIVE, RankSwitched): _note_switched,
    (State.ACTIVE, RankLost): _ignore,
    (State.ACTIVE, DeadlineCheck): _ignore,
    (State.ABORTED, Persisted): _ignore,
    (State.ABORTED, RankStaged): _ignore,
    (State.ABORTED, RankRejected): _ignore,
    (State.ABORTED, RankSwitched): _note_switched,
    (State.ABORTED, RankLost): _ignore,
    (State.ABORTED, DeadlineCheck): _ignore,
}
"""The handler of every event in every state, including those that do nothing."""

"""`Wave`: rolls out one generation to all ranks, as a table of states and events.

Pure: an event goes in; the next state of the wave and the commands to carry out come out.

    planned -> staging -> staged -> switched -> active        before a switch -> aborted

Ranks switch by agreement in their own step header, without the balancer. So if one rank switched,
all did at that step, which overrides what the balancer assumed, even an abort. One report may be
false: the other ranks must confirm it, or not deny it in heartbeats for a while, unless lost.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy


class State(StrEnum):
    """State of a wave."""

    PLANNED = "planned"
    """Waits for its turn, then is persisted; not yet sent to any rank."""

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
class RankRuns:
    """A rank's heartbeat: the generation that it runs. Matters once a switch was reported."""

    rank: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank disconnected or was silent for too long."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineCheck:
    """Time passed: check the timeouts."""


Event = Persisted | RankStaged | RankRejected | RankSwitched | RankRuns | RankLost | DeadlineCheck


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
    """Ranks that reported the switch, or run the target by their heartbeat."""
    denying_ranks: frozenset[int] = frozenset()
    """Ranks that by their latest heartbeat run the base, after another one reported the switch."""
    disproved_ranks: frozenset[int] = frozenset()
    """Ranks whose reports of this switch were false: they are not heeded again."""
    lost_ranks: frozenset[int] = frozenset()
    """Ranks whose reports are not waited for."""
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
            reason=f"generation {target.generation} waits for its turn, then is persisted",
        )
        return wave, (PersistProposed(layout=target),)

    @property
    def is_over(self) -> bool:
        """Whether it has ended; a late `RankSwitched` can still revive an aborted one."""
        return self.state in {State.ACTIVE, State.ABORTED}

    @property
    def awaits_reports(self) -> bool:
        """Whether a rank has reported the switch and others have yet to confirm or deny it."""
        return self.state is State.STAGED and bool(self.switched_ranks)

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
    reason = "all ranks have staged and switch at their next step"
    return _enter(noted, State.STAGED, now, reason), ()


def _rejected(wave: Wave, event: RankRejected, now: float) -> tuple[Wave, Commands]:
    if wave.switched_ranks:
        return wave, ()  # Ranks switch together: what the ranks report next decides.
    return _abort(wave, f"rank {event.rank} rejected it: {event.reason}", now)


def _lost(wave: Wave, event: RankLost, now: float) -> tuple[Wave, Commands]:
    rank = {event.rank}
    noted = replace(
        wave, lost_ranks=wave.lost_ranks | rank, denying_ranks=wave.denying_ranks - rank
    )
    cause = f"rank {event.rank} was lost: {event.reason}"
    if not wave.switched_ranks:
        return _abort(noted, cause, now)
    return _commit_if_confirmed(noted, now, cause)


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
    if not wave.switched_ranks:
        return _abort(wave, cause, now)
    if len(wave.denying_ranks) < len(wave.switched_ranks):
        return _commit(wave, now, _despite(wave, cause))
    return _disprove(wave, wave.switched_ranks, wave.denying_ranks, now)


def _note_switched(wave: Wave, event: RankSwitched, now: float) -> tuple[Wave, Commands]:
    if wave.is_faulted or event.rank in wave.disproved_ranks:
        return wave, ()
    is_committed = wave.state in {State.SWITCHED, State.ACTIVE}
    if wave.switch_step is not None and event.step != wave.switch_step:
        if is_committed:
            return wave, ()  # Ranks run it: one late report cannot change that.
        reason = (
            f"ranks contradict each other: rank {event.rank} switched to generation "
            f"{event.generation} at step {event.step}, {_names(wave.switched_ranks)} at step "
            f"{wave.switch_step}; restart the pool"
        )
        return _enter(wave, State.ABORTED, now, reason), ()
    noted = replace(
        wave,
        switched_ranks=wave.switched_ranks | {event.rank},
        denying_ranks=wave.denying_ranks - {event.rank},
        switch_step=event.step,
        worst_stall_us=max(wave.worst_stall_us, event.stall_us),
    )
    if is_committed:
        return noted, ()
    if not wave.switched_ranks:
        # All ranks had staged, if it is true. The others get the whole time to report.
        noted = replace(noted, staged_ranks=frozenset(range(noted.num_ranks)))
        reason = f"rank {event.rank} switched at step {event.step}; the other ranks report it next"
        noted = _enter(noted, State.STAGED, now, reason)
    return _commit_if_confirmed(noted, now, "")


def _note_running(wave: Wave, event: RankRuns, now: float) -> tuple[Wave, Commands]:
    """Confirm or deny the switch; all heartbeats after a rank's report of its switch show it."""
    if not wave.switched_ranks:
        return wave, ()
    rank = {event.rank}
    heard = replace(wave, lost_ranks=wave.lost_ranks - rank)
    if event.running >= wave.target.generation:
        noted = replace(
            heard,
            switched_ranks=heard.switched_ranks | rank,
            denying_ranks=heard.denying_ranks - rank,
        )
        return _commit_if_confirmed(noted, now, "")
    if event.rank in wave.switched_ranks:
        return _disprove(heard, rank, rank, now)
    return replace(heard, denying_ranks=heard.denying_ranks | rank), ()


def _commit_done(wave: Wave, _event: Persisted, now: float) -> tuple[Wave, Commands]:
    reason = f"generation {wave.target.generation} is in use and committed"
    return _enter(wave, State.ACTIVE, now, reason), ()


def _abort(wave: Wave, cause: str, now: float) -> tuple[Wave, Commands]:
    command = SendAbort(generation=wave.target.generation, reason=cause)
    return _enter(wave, State.ABORTED, now, cause), (command,)


def _commit_if_confirmed(wave: Wave, now: float, cause: str) -> tuple[Wave, Commands]:
    """Commit once all ranks that are not lost have reported the switch."""
    if len(wave.lost_ranks) + len(wave.switched_ranks) < wave.num_ranks:
        return wave, ()  # Most reports end here, and there is one for each rank.
    if not set(range(wave.num_ranks)) - wave.lost_ranks <= wave.switched_ranks:
        return wave, ()
    if len(wave.switched_ranks) == wave.num_ranks:
        return _commit(wave, now, f"all ranks switched at step {wave.switch_step}")
    lost = f"{_names(wave.lost_ranks)} {'was' if len(wave.lost_ranks) == 1 else 'were'} lost"
    return _commit(wave, now, _despite(wave, cause or lost))


def _despite(wave: Wave, cause: str) -> str:
    return f"{cause}; but {_names(wave.switched_ranks)} switched, and ranks switch together"


def _disprove(
    wave: Wave, ranks: AbstractSet[int], by: AbstractSet[int], now: float
) -> tuple[Wave, Commands]:
    """Heed `ranks` no more: they reported a switch, but the heartbeats of ranks `by` deny it."""
    left = wave.switched_ranks - ranks
    noted = replace(
        wave,
        switched_ranks=left,
        disproved_ranks=wave.disproved_ranks | ranks,
        denying_ranks=(wave.denying_ranks | by) if left else frozenset(),
        switch_step=wave.switch_step if left else None,
    )
    if left:
        return noted, ()
    cause = (
        f"{_names(ranks)} reported the switch, but {_names(by)} still ran generation "
        f"{wave.base.generation} afterwards: restart {_names(ranks)}"
    )
    return _abort(noted, cause, now)


def _commit(wave: Wave, now: float, reason: str) -> tuple[Wave, Commands]:
    return _enter(wave, State.SWITCHED, now, reason), (PersistCommitted(layout=wave.target),)


def _enter(wave: Wave, state: State, now: float, reason: str) -> Wave:
    return replace(wave, state=state, entered_s=now, reason=reason)


def _names(ranks: AbstractSet[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


_Handler = Callable[[Wave, Any, float], tuple[Wave, Commands]]

_HANDLERS: dict[type[Event], tuple[_Handler, ...]] = {
    # planned, staging, staged, switched, active, aborted
    Persisted: (_stage, _ignore, _ignore, _commit_done, _ignore, _ignore),
    RankStaged: (_ignore, _note_staged, _ignore, _ignore, _ignore, _ignore),
    RankRejected: (_ignore, _rejected, _rejected, _ignore, _ignore, _ignore),
    RankSwitched: (_note_switched,) * len(State),
    RankRuns: (_ignore, _ignore, _note_running, _ignore, _ignore, _ignore),
    RankLost: (_lost_early, _lost, _lost, _ignore, _ignore, _ignore),
    DeadlineCheck: (_too_long, _too_long, _too_long, _too_long, _ignore, _ignore),
}

TABLE: dict[tuple[State, type[Event]], _Handler] = {
    (state, event): handler
    for event, handlers in _HANDLERS.items()
    for state, handler in zip(State, handlers, strict=True)
}
"""The handler of every event in every state, including those that do nothing."""

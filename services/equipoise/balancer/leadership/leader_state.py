"""`LeaderState`: whether this balancer leads, as a table of roles and events.

Pure: an event yields the next state and a request to the register, which is one record replaced by
compare-and-set. Follows the leader election of Kubernetes and Patroni, without their clock faults:

- A candidate never reads a time that another machine wrote. A lease is expired when reads found the
  same record for the lease's duration on the candidate's monotonic clock. Between two reads at most
  the length of a round counts, so a clock that jumps gains nothing. In the place of a lease that
  vanished it puts a vacancy, which expires likewise: the leader before may not know yet.
- A leader counts from before it *sent* its last successful renewal, and only to `renew_deadline_s`,
  so it stops at least `duration_s - renew_deadline_s` before any candidate may start.
- A register that failed over may have lost its latest records, and with them a leader that this
  candidate has never seen. So neither an older record nor one with a lower term than the store has
  seen is free at once, terms are skipped, and no leader continues its term: it may have been
  suspended together with its clock while the lost one led.
  Its holder may replace such a record one round before others do: it knows more of what was lost.
  How many terms are skipped is random, so that no two leaders that lost the same use the same one;
  so is the first term, because an empty register may have lost all.
- Each new leader starts a new term, the fencing number of every write and push. What a paused
  process does before it reads its clock is rejected by every peer that saw a higher term.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from equipoise.balancer.leadership.lease import (
    MAX_LEASE_S,
    Candidate,
    LeaseRecord,
    LeaseTiming,
    Sighting,
)
from equipoise.wire.checks import MAX_TERM

_NO_TERM_LEFT = (
    f"term {MAX_TERM} is the last one, and only a damaged lease or store has it: stop all "
    "balancers, empty the lease, empty the store and start them; workers report what they run"
)


SKIPPED_TERMS = 1000
"""Terms left out where the register may have lost its latest records: it lost fewer."""


class LeaderRole(StrEnum):
    """The role of a balancer."""

    FOLLOWING = "following"
    """Another balancer leads, or none does yet."""

    CAMPAIGNING = "campaigning"
    """It has requested the lease."""

    LEADING = "leading"
    """It plans and pushes while its lease is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A round starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saw:
    """The register was read; None if it is empty."""

    sighting: Sighting | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """The register accepted our record; `sent_s` is the time before the request."""

    sighting: Sighting
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overtaken:
    """The register held another version than expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The register did not answer, or rejected the request; a write may have happened or not."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outranked:
    """The store has seen this term; to lead, ours must be higher."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """This balancer cannot lead for now; another one may."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsOver:
    """The store differs from what this balancer knows: it has to lead in another term."""

    reason: str


LeaseEvent = Due | Saw | Wrote | Overtaken | Failed | Ticked | Outranked | GaveUp | StartsOver


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRegister:
    """Read the register, then report `Saw` or `Failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRegister:
    """Replace version `replacing` (None: an empty register) by `record`.

    Then report `Wrote`, `Overtaken` or `Failed`.
    """

    record: LeaseRecord
    replacing: str | None


Action = ReadRegister | WriteRegister | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """What a candidate knows. Times are monotonic seconds of its own clock."""

    candidate: Candidate
    timing: LeaseTiming
    role: LeaderRole = LeaderRole.FOLLOWING

    term: int = 0
    """Term that it leads or led last."""

    renewed_s: float = 0.0
    """When the last accepted campaign or renewal was sent."""

    seen: Sighting | None = None
    """What the register held at the last read."""

    looked_s: float = 0.0
    """When the register was last read."""

    unchanged_s: float = 0.0
    """How long reads have found the same record."""

    highest_term: int = 0
    """Highest term that the register or the store has shown."""

    register_term: int = 0
    """Highest term that the register has shown: it shows a lower one if it went back in time."""

    reason: str = "the lease has not been read yet"
    """Human-readable reason for its role."""

    def leads(self, *, now: float) -> bool:
        """Whether it may write and push now."""
        return self.role is LeaderRole.LEADING and now < self.valid_until_s

    @property
    def valid_until_s(self) -> float:
        """When its term ends unless renewed."""
        return self.renewed_s + self.timing.renew_deadline_s

    def has_run_out(self, *, now: float) -> bool:
        """Whether its lease expired while it was leading."""
        return self.role is LeaderRole.LEADING and now >= self.valid_until_s

    @property
    def leader_address(self) -> str:
        """Address of another balancer that leads; empty if none is known."""
        if self.seen is None or self.seen.record.holder in {"", self.candidate.name}:
            return ""
        return self.seen.record.address

    def step(self, event: LeaseEvent, *, now: float) -> tuple["LeaderState", Action]:
        """Return the state after an event, and the request to the register."""
        state = self
        if state.has_run_out(now=now):
            state = _follow(state, "the lease could not be renewed in time")
        return TABLE[state.role, type(event)](state, event, now)

    def release(self) -> Action:
        """Empty the register on shutdown, so that no candidate waits for the lease to expire."""
        return _freed(self) if self.role is LeaderRole.LEADING else None


# Handlers of events. ------------------------------------------------------------------------------


def _ignore(state: LeaderState, _event: LeaseEvent, _now: float) -> tuple[LeaderState, Action]:
    return state, None


def _look(state: LeaderState, _event: Due, _now: float) -> tuple[LeaderState, Action]:
    if state.role is not LeaderRole.FOLLOWING:
        state = replace(state, role=LeaderRole.FOLLOWING)
    return state, ReadRegister()


def _consider(state: LeaderState, event: Saw, now: float) -> tuple[LeaderState, Action]:
    noted = _note(state, event.sighting, now)
    if noted.seen is not None and not _is_free(noted, noted.seen):
        return replace(noted, reason=_who_leads(noted, noted.seen)), None
    if noted.highest_term >= MAX_TERM:
        return replace(noted, reason=_NO_TERM_LEFT), None
    if noted.seen is None and noted.highest_term:
        return replace(noted, reason="the lease was lost"), _vacancy(noted, now)
    record = LeaseRecord(
        holder=noted.candidate.name,
        address=noted.candidate.address,
        term=_next_term(noted),
        renewals=0,
        duration_s=noted.timing.duration_s,
    )
    campaigning = replace(noted, role=LeaderRole.CAMPAIGNING, reason="the lease is free")
    return campaigning, WriteRegister(record=record, replacing=_version(noted))


def _win(state: LeaderState, event: Wrote, now: float) -> tuple[LeaderState, Action]:
    if now >= event.sent_s + state.timing.renew_deadline_s:
        return _follow(state, "the lease was granted, but the answer came too late"), None
    if event.sighting.record.term <= state.highest_term:
        return _follow(state, "a higher term was seen meanwhile"), None
    leading = replace(
        _extend(state, event, now),
        role=LeaderRole.LEADING,
        term=event.sighting.record.term,
        reason=f"elected in term {event.sighting.record.term}",
    )
    return leading, None


def _lose(state: LeaderState, _event: Overtaken, _now: float) -> tuple[LeaderState, Action]:
    return _follow(state, "another balancer was elected first"), None


def _doubt(state: LeaderState, event: Failed, _now: float) -> tuple[LeaderState, Action]:
    return _follow(state, f"the lease is not available: {event.reason}"), None


def _renew(state: LeaderState, _event: Due, _now: float) -> tuple[LeaderState, Action]:
    return state, _renewal(state)


def _renewed(state: LeaderState, event: Wrote, now: float) -> tuple[LeaderState, Action]:
    return _extend(state, event, now), None


def _look_again(state: LeaderState, _event: Overtaken, _now: float) -> tuple[LeaderState, Action]:
    # The writer may be this balancer: a renewal whose answer was lost.
    return state, ReadRegister()


def _recognise(state: LeaderState, event: Saw, now: float) -> tuple[LeaderState, Action]:
    noted, sighting = _note(state, event.sighting, now), event.sighting
    if sighting is None:
        return _follow(noted, "the lease was deleted"), None
    record = sighting.record
    if record.holder != state.candidate.name or record.term != state.term:
        holder = record.holder if record.holder and not record.is_vacancy else "no balancer"
        return _follow(noted, f"{holder} holds the lease now"), None
    if not sighting.is_latest:
        return _follow(noted, "the register failed over and may have lost a later leader"), None
    return noted, _renewal(noted)


def _hold_on(state: LeaderState, event: Failed, _now: float) -> tuple[LeaderState, Action]:
    return replace(state, reason=f"the lease was not renewed: {event.reason}"), None


def _heed(state: LeaderState, event: Outranked, _now: float) -> tuple[LeaderState, Action]:
    if event.term <= state.highest_term:
        return state, None
    outranked = replace(state, highest_term=event.term)
    return _follow(outranked, f"a higher term was seen: {event.term}"), None


def _start_over(state: LeaderState, event: StartsOver, _now: float) -> tuple[LeaderState, Action]:
    # The record stays: it is free to its holder at once, and to others when it has expired.
    return _follow(state, event.reason), None


def _yield(state: LeaderState, event: GaveUp, _now: float) -> tuple[LeaderState, Action]:
    return _follow(state, event.reason), _freed(state)


# Shared by handlers. -----------------------------------------------------------------------------


def _follow(state: LeaderState, reason: str) -> LeaderState:
    return replace(state, role=LeaderRole.FOLLOWING, reason=reason)


def _note(state: LeaderState, sighting: Sighting | None, now: float) -> LeaderState:
    before, after = _version(state), sighting.version if sighting is not None else None
    term = sighting.record.term if sighting is not None else 0
    timing = state.timing
    passed_s = min(now - state.looked_s, timing.round_s)
    return replace(
        state,
        seen=sighting,
        looked_s=now,
        unchanged_s=state.unchanged_s + passed_s if before == after else 0.0,
        highest_term=max(state.highest_term, term),
        register_term=max(state.register_term, term),
    )


def _is_free(state: LeaderState, seen: Sighting) -> bool:
    # A lease of ours from a term that ended cannot be held by another candidate. But if the
    # register lost a later one, which the store may have seen, its leader may not know yet.
    record = seen.record
    is_latest = seen.is_latest and record.term == state.highest_term
    if is_latest and record.holder in {"", state.candidate.name}:
        return True
    # The record may be damaged: no balancer has a longer duration, and ours is safe for its peers.
    longest_s = max(state.timing.duration_s, min(record.duration_s, MAX_LEASE_S))
    if not seen.is_latest and record.holder != state.candidate.name:
        longest_s += state.timing.round_s
    return state.unchanged_s >= longest_s


def _next_term(state: LeaderState) -> int:
    if state.seen is not None and state.seen.is_latest:
        return min(MAX_TERM, state.highest_term + 1)
    return _uncertain_term(state)


def _uncertain_term(state: LeaderState) -> int:
    """Return one that neither a lost leader nor another candidate uses, as far as can be known."""
    skipped = SKIPPED_TERMS if state.highest_term else 0
    return min(MAX_TERM, state.highest_term + skipped + state.candidate.term_offset)


def _who_leads(state: LeaderState, seen: Sighting) -> str:
    record = seen.record
    if record.is_vacancy:
        return f"the lease was lost, and its leader may lead for up to {record.duration_s:g} s"
    if record.term < state.register_term:
        longest_s = max(state.timing.duration_s, min(record.duration_s, MAX_LEASE_S))
        return (
            f"the lease went back from term {state.register_term} to {record.term}, and the leader "
            f"of the later one may lead for up to {longest_s:g} s"
        )
    if record.holder not in {"", state.candidate.name}:
        return f"{record.holder} leads"
    found = f"the store has seen term {state.highest_term}, but the lease has term {record.term}"
    if not seen.is_latest:
        found = f"the register failed over after the lease of term {record.term} was written"
    return f"{found}, and a later leader may lead for up to {state.timing.duration_s:g} s"


def _vacancy(state: LeaderState, now: float) -> WriteRegister:
    """Fill an empty register that was not empty before: the vacancy must last for a lease."""
    vacancy = LeaseRecord.vacancy(
        state.candidate,
        term=_uncertain_term(state) - 1,
        duration_s=state.timing.duration_s,
        now=now,
    )
    return WriteRegister(record=vacancy, replacing=None)


def _extend(state: LeaderState, event: Wrote, now: float) -> LeaderState:
    return replace(_note(state, event.sighting, now), renewed_s=event.sent_s)


def _renewal(state: LeaderState) -> WriteRegister:
    assert state.seen is not None, "a leader has seen its own record"
    record = state.seen.record
    return WriteRegister(
        record=replace(record, renewals=record.renewals + 1), replacing=state.seen.version
    )


def _freed(state: LeaderState) -> WriteRegister:
    renewal = _renewal(state)
    return replace(renewal, record=replace(renewal.record, holder="", address=""))


def _version(state: LeaderState) -> str | None:
    return state.seen.version if state.seen is not None else None


_Handler = Callable[[LeaderState, Any, float], tuple[LeaderState, Action]]

TABLE: dict[tuple[LeaderRole, type[LeaseEvent]], _Handler] = {
    (LeaderRole.FOLLOWING, Due): _look,
    (LeaderRole.FOLLOWING, Saw): _consider,
    (LeaderRole.FOLLOWING, Wrote): _ignore,  # The next read finds it: a vacancy, or a late record.
    (LeaderRole.FOLLOWING, Overtaken): _ignore,
    (LeaderRole.FOLLOWING, Failed): _doubt,
    (LeaderRole.FOLLOWING, Ticked): _ignore,
    (LeaderRole.FOLLOWING, Outranked): _heed,
    (LeaderRole.FOLLOWING, GaveUp): _ignore,
    (LeaderRole.FOLLOWING, StartsOver): _ignore,
    (LeaderRole.CAMPAIGNING, Due): _look,
    (LeaderRole.CAMPAIGNING, Saw): _ignore,
    (LeaderRole.CAMPAIGNING, Wrote): _win,
    (LeaderRole.CAMPAIGNING, Overtaken): _lose,
    (LeaderRole.CAMPAIGNING, Failed): _doubt,
    (LeaderRole.CAMPAIGNING, Ticked): _ignore,
    (LeaderRole.CAMPAIGNING, Outranked): _heed,
    (LeaderRole.CAMPAIGNING, GaveUp): _ignore,
    (LeaderRole.CAMPAIGNING, StartsOver): _ignore,
    (LeaderRole.LEADING, Due): _renew,
    (LeaderRole.LEADING, Saw): _recognise,
    (LeaderRole.LEADING, Wrote): _renewed,
    (LeaderRole.LEADING, Overtaken): _look_again,
    (LeaderRole.LEADING, Failed): _hold_on,
    (LeaderRole.LEADING, Ticked): _ignore,
    (LeaderRole.LEADING, Outranked): _heed,
    (LeaderRole.LEADING, GaveUp): _yield,
    (LeaderRole.LEADING, StartsOver): _start_over,
}
"""The handler of every event in every role, including those that do nothing."""

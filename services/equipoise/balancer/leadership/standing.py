"""`Standing`: whether this balancer leads, as a table of roles and events.

Pure: an event goes in, the next standing and what to ask the register for come out. The register is
one record that is replaced by compare-and-set; who may replace it follows from here alone. The idea
is that of Kubernetes' leader election and of Patroni, with the faults of their clocks left out:

- A candidate never reads a time that another machine wrote. It takes a lease for expired when the
  very same record was there for the lease's duration on its own monotonic clock, look after look:
  between two looks no more time counts than a round may take, so a clock that leaps gains nothing.
- A leader counts from before it *sent* its last successful renewal, and only to `renew_deadline_s`,
  so it stops before any candidate may begin: by `duration_s - renew_deadline_s` at least.
- Each start of leading is a new term, the fencing number of every write and push. What a paused
  process does before it looks at its clock is refused by whoever saw a higher term.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """How long a leader leads without word from the register, and how often it is asked.

    Raises:
        ValueError: `retry_s + request_timeout_s <= renew_deadline_s < duration_s` does not hold, so
            that one lost request would end a term, or two balancers could lead.
    """

    duration_s: float = 3.0
    """How long a record must be left alone before another candidate replaces it."""

    renew_deadline_s: float = 2.0
    """How long a leader leads after it sent the last renewal that was accepted."""

    retry_s: float = 0.5
    """From one round to the next: renewals of the leader, looks of the others."""

    request_timeout_s: float = 0.5
    """How long the register may take to answer."""

    @classmethod
    def lasting(cls, duration_s: float) -> "LeaseTiming":
        """The same proportions for another duration."""
        return cls(
            duration_s=duration_s,
            renew_deadline_s=duration_s * 2 / 3,
            retry_s=duration_s / 6,
            request_timeout_s=duration_s / 6,
        )

    def __post_init__(self) -> None:
        if not (
            self.retry_s > 0
            and self.request_timeout_s > 0
            and self.retry_s + self.request_timeout_s <= self.renew_deadline_s < self.duration_s
        ):
            raise ValueError(
                "a lease needs 0 < retry + request timeout <= renew deadline < duration, not "
                f"{self.retry_s:g} + {self.request_timeout_s:g}, {self.renew_deadline_s:g}, "
                f"{self.duration_s:g} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A balancer process: a name that no other one ever has, and where workers reach it."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Who leads. `holder` is empty when nobody does; `renewals` make every record another one."""

    holder: str
    address: str
    term: int
    renewals: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A record as it was in the register; `version` changes with every write of it."""

    record: LeaseRecord
    version: str


class LeaderRole(StrEnum):
    """What a balancer is to the others."""

    FOLLOWING = "following"
    """Another one leads, or nobody does yet."""

    CAMPAIGNING = "campaigning"
    """It has asked for the lease."""

    LEADING = "leading"
    """It plans and pushes, as long as its lease is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A round begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saw:
    """The register was read; None: it is empty."""

    sighting: Sighting | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """The register took our record. `sent_s` is from before it was asked."""

    sighting: Sighting
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overtaken:
    """The register held another version than the one to be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The register did not answer, or refused; whether a write happened is unknown."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outranked:
    """A worker or the store has seen this term: ours must be higher, or another one's is."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """This balancer cannot do what a leader must; let another one try."""

    reason: str


Event = Due | Saw | Wrote | Overtaken | Failed | Ticked | Outranked | GaveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read the register, then report `Saw` or `Failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Put `record` in the place of version `replacing` (None: of nothing).

    Then report `Wrote`, `Overtaken` or `Failed`.
    """

    record: LeaseRecord
    replacing: str | None


Request = Read | Write | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a candidate knows. Times are monotonic seconds of its own clock.

    `term` is the one it leads or led last, `valid_until_s` when it stops if nothing is heard.
    `seen` is what the register held at `looked_s`, when it had been the same for `unchanged_s`;
    `highest_term` is that of anybody. `reason` says in words why it stands where it does.
    """

    candidate: Candidate
    timing: LeaseTiming
    role: LeaderRole = LeaderRole.FOLLOWING
    term: int = 0
    valid_until_s: float = 0.0
    seen: Sighting | None = None
    looked_s: float = 0.0
    unchanged_s: float = 0.0
    highest_term: int = 0
    reason: str = "the lease was not looked at yet"

    def leads(self, *, now: float) -> bool:
        """Whether it may write and push at this moment."""
        return self.role is LeaderRole.LEADING and now < self.valid_until_s

    def has_run_out(self, *, now: float) -> bool:
        """Whether a term is over because its lease was not renewed in time."""
        return self.role is LeaderRole.LEADING and now >= self.valid_until_s

    @property
    def leader_address(self) -> str:
        """Where the other one that leads is, as far as is known; empty if nobody is known to."""
        if self.seen is None or self.seen.record.holder in {"", self.candidate.name}:
            return ""
        return self.seen.record.address

    def step(self, event: Event, *, now: float) -> tuple["Standing", Request]:
        """The standing after an event, and what to ask the register for."""
        standing = self
        if standing.has_run_out(now=now):
            standing = _follow(standing, "the lease could not be renewed in time")
        return TABLE[standing.role, type(event)](standing, event, now)

    def release(self) -> Request:
        """Empty the register at the end, so that nobody has to wait for the lease to run out."""
        return _freed(self) if self.role is LeaderRole.LEADING else None


# Handlers: what an event does in the roles that the table lists it for. -------------------------


def _ignore(standing: Standing, _event: Event, _now: float) -> tuple[Standing, Request]:
    return standing, None


def _look(standing: Standing, _event: Due, _now: float) -> tuple[Standing, Request]:
    return replace(standing, role=LeaderRole.FOLLOWING), Read()


def _consider(standing: Standing, event: Saw, now: float) -> tuple[Standing, Request]:
    noted = _note(standing, event.sighting, now)
    if not _is_free(noted):
        assert noted.seen is not None, "nothing is free"
        return replace(noted, reason=f"{noted.seen.record.holder} leads"), None
    record = LeaseRecord(
        holder=noted.candidate.name,
        address=noted.candidate.address,
        term=noted.highest_term + 1,
        renewals=0,
        duration_s=noted.timing.duration_s,
    )
    campaigning = replace(noted, role=LeaderRole.CAMPAIGNING, reason="the lease is free")
    return campaigning, Write(record=record, replacing=_version(noted))


def _win(standing: Standing, event: Wrote, now: float) -> tuple[Standing, Request]:
    if now >= event.sent_s + standing.timing.renew_deadline_s:
        return _follow(standing, "the lease was had, but the answer came too late"), None
    if event.sighting.record.term <= standing.highest_term:
        return _follow(standing, "a higher term was heard of meanwhile"), None
    leading = replace(
        _extend(standing, event, now),
        role=LeaderRole.LEADING,
        term=event.sighting.record.term,
        reason=f"elected in term {event.sighting.record.term}",
    )
    return leading, None


def _lose(standing: Standing, _event: Overtaken, _now: float) -> tuple[Standing, Request]:
    return _follow(standing, "another balancer was quicker"), None


def _doubt(standing: Standing, event: Failed, _now: float) -> tuple[Standing, Request]:
    return _follow(standing, f"the lease cannot be had: {event.reason}"), None


def _renew(standing: Standing, _event: Due, _now: float) -> tuple[Standing, Request]:
    return standing, _renewal(standing)


def _renewed(standing: Standing, event: Wrote, now: float) -> tuple[Standing, Request]:
    return _extend(standing, event, now), None


def _look_again(standing: Standing, _event: Overtaken, _now: float) -> tuple[Standing, Request]:
    # Perhaps by ourselves: a renewal whose answer was lost.
    return standing, Read()


def _recognise(standing: Standing, event: Saw, now: float) -> tuple[Standing, Request]:
    noted = _note(standing, event.sighting, now)
    record = event.sighting.record if event.sighting is not None else None
    if record is None:
        return _follow(noted, "the lease is gone"), None
    if record.holder != standing.candidate.name or record.term != standing.term:
        return _follow(noted, f"{record.holder or 'nobody'} holds the lease now"), None
    return noted, _renewal(noted)


def _hold_on(standing: Standing, event: Failed, _now: float) -> tuple[Standing, Request]:
    return replace(standing, reason=f"the lease was not renewed: {event.reason}"), None


def _heed(standing: Standing, event: Outranked, _now: float) -> tuple[Standing, Request]:
    if event.term <= standing.highest_term:
        return standing, None
    outranked = replace(standing, highest_term=event.term)
    return _follow(outranked, f"term {event.term} was heard of"), None


def _yield(standing: Standing, event: GaveUp, _now: float) -> tuple[Standing, Request]:
    return _follow(standing, event.reason), _freed(standing)


# Shared by handlers. -----------------------------------------------------------------------------


def _follow(standing: Standing, reason: str) -> Standing:
    return replace(standing, role=LeaderRole.FOLLOWING, reason=reason)


def _note(standing: Standing, sighting: Sighting | None, now: float) -> Standing:
    before, after = _version(standing), sighting.version if sighting is not None else None
    term = sighting.record.term if sighting is not None else 0
    timing = standing.timing
    passed_s = min(now - standing.looked_s, timing.retry_s + timing.request_timeout_s)
    return replace(
        standing,
        seen=sighting,
        looked_s=now,
        unchanged_s=standing.unchanged_s + passed_s if before == after else 0.0,
        highest_term=max(standing.highest_term, term),
    )


def _is_free(standing: Standing) -> bool:
    if standing.seen is None:
        return True
    record = standing.seen.record
    # Ours in a term that ended: nobody else can have it, and nobody else has to wait for it.
    return (
        record.holder in {"", standing.candidate.name} or standing.unchanged_s >= record.duration_s
    )


def _extend(standing: Standing, event: Wrote, now: float) -> Standing:
    noted = _note(standing, event.sighting, now)
    return replace(noted, valid_until_s=event.sent_s + standing.timing.renew_deadline_s)


def _renewal(standing: Standing) -> Write:
    assert standing.seen is not None, "a leader has seen its own record"
    record = standing.seen.record
    return Write(
        record=replace(record, renewals=record.renewals + 1), replacing=standing.seen.version
    )


def _freed(standing: Standing) -> Write:
    renewal = _renewal(standing)
    return replace(renewal, record=replace(renewal.record, holder="", address=""))


def _version(standing: Standing) -> str | None:
    return standing.seen.version if standing.seen is not None else None


_Handler = Callable[[Standing, Any, float], tuple[Standing, Request]]

TABLE: dict[tuple[LeaderRole, type[Event]], _Handler] = {
    (LeaderRole.FOLLOWING, Due): _look,
    (LeaderRole.FOLLOWING, Saw): _consider,
    (LeaderRole.FOLLOWING, Wrote): _ignore,  # It came too late; the next look finds our own record.
    (LeaderRole.FOLLOWING, Overtaken): _ignore,
    (LeaderRole.FOLLOWING, Failed): _doubt,
    (LeaderRole.FOLLOWING, Ticked): _ignore,
    (LeaderRole.FOLLOWING, Outranked): _heed,
    (LeaderRole.FOLLOWING, GaveUp): _ignore,
    (LeaderRole.CAMPAIGNING, Due): _look,
    (LeaderRole.CAMPAIGNING, Saw): _ignore,
    (LeaderRole.CAMPAIGNING, Wrote): _win,
    (LeaderRole.CAMPAIGNING, Overtaken): _lose,
    (LeaderRole.CAMPAIGNING, Failed): _doubt,
    (LeaderRole.CAMPAIGNING, Ticked): _ignore,
    (LeaderRole.CAMPAIGNING, Outranked): _heed,
    (LeaderRole.CAMPAIGNING, GaveUp): _ignore,
    (LeaderRole.LEADING, Due): _renew,
    (LeaderRole.LEADING, Saw): _recognise,
    (LeaderRole.LEADING, Wrote): _renewed,
    (LeaderRole.LEADING, Overtaken): _look_again,
    (LeaderRole.LEADING, Failed): _hold_on,
    (LeaderRole.LEADING, Ticked): _ignore,
    (LeaderRole.LEADING, Outranked): _heed,
    (LeaderRole.LEADING, GaveUp): _yield,
}
"""What every event does in every role; those that do nothing are listed too."""

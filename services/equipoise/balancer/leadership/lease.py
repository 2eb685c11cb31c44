"""The lease: its record, its timing, and who can hold it."""

from dataclasses import dataclass

MAX_LEASE_S = 60.0
"""Longest lease duration of any balancer, seconds. A record that states a longer one expires after
this time."""

_NOBODY = "nobody, noted by "
"""Begins the holder of a vacancy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """How long a leader leads without an answer from the register, and how often it asks.

    Raises:
        ValueError: `retry_s + request_timeout_s <= renew_deadline_s < duration_s` does not hold, so
            that one lost request would end a term, or two balancers could lead.
    """

    duration_s: float = 3.0
    """How long a record must be unchanged before another candidate may replace it."""

    renew_deadline_s: float = 2.0
    """How long a leader leads after it sent its last accepted renewal."""

    retry_s: float = 0.5
    """Time between rounds: renewals of the leader, reads of the others."""

    request_timeout_s: float = 0.5
    """Timeout of a request to the register."""

    @classmethod
    def lasting(cls, duration_s: float) -> "LeaseTiming":
        """Return the same proportions for another duration."""
        return cls(
            duration_s=duration_s,
            renew_deadline_s=duration_s * 2 / 3,
            retry_s=duration_s / 6,
            request_timeout_s=duration_s / 6,
        )

    @property
    def round_s(self) -> float:
        """Longest time between two answers of the register."""
        return self.retry_s + self.request_timeout_s

    def __post_init__(self) -> None:
        if not (
            self.retry_s > 0
            and self.request_timeout_s > 0
            and self.round_s <= self.renew_deadline_s < self.duration_s
        ):
            raise ValueError(
                "a lease needs 0 < retry + request timeout <= renew deadline < duration, not "
                f"{self.retry_s:g} + {self.request_timeout_s:g}, {self.renew_deadline_s:g}, "
                f"{self.duration_s:g} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A balancer process."""

    name: str
    """Unique."""

    address: str
    """Where workers reach it."""

    term_offset: int
    """Random, from 1: the term in which it leads if none is known, and how many more terms it skips
    where the register may have lost the latest: a leader that nobody knows may use the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Who leads. `holder` is empty if no one does; `renewals` makes every record unique."""

    holder: str
    address: str
    term: int
    renewals: int
    duration_s: float

    @classmethod
    def vacancy(
        cls, candidate: Candidate, *, term: int, duration_s: float, now: float
    ) -> "LeaseRecord":
        """Return what a candidate puts in the place of a lost lease, whose leader may not know yet.

        It expires like a lease. `now` is the candidate's clock and makes the record unique.
        """
        return cls(
            holder=f"{_NOBODY}{candidate.name}",
            address="",
            term=term,
            renewals=int(now * 1000),
            duration_s=duration_s,
        )

    @property
    def is_vacancy(self) -> bool:
        """Whether it stands for a lost lease."""
        return self.holder.startswith(_NOBODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A record as read from the register."""

    record: LeaseRecord

    version: str
    """Changes with every write, and when the register may have lost writes."""

    is_latest: bool = True
    """Whether the register cannot have lost a later record. False for one that was written before a
    failover of the server."""

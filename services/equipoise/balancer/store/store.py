"""What the balancer must not forget, and the promise every store of it keeps.

A store holds, for each pool: layouts (proposed before anybody stages them, committed once all ranks
run them), the highest generation ever used, membership, moving averages, decisions, and what
operators ordered and hold the pool to. It decides nothing. `term` is the fencing number of the
balancer that writes: once a store saw a higher term, it refuses the lower one, so that a balancer
that lost its leadership cannot undo its successor.
"""

from enum import StrEnum
from typing import Protocol

from equipoise.planning.layout import Layout
from equipoise.pool.records import AuditRecord, AverageRecord, DecisionRecord, EpochMembers, Hold

MAX_DECISIONS = 1000
"""Decisions kept for each pool; older ones are dropped."""

MAX_AUDIT_ENTRIES = 1000
"""Operators' orders kept for each pool; older ones are dropped."""

MAX_LAYOUTS = 64
"""Layouts kept for each pool besides the committed one; older ones are dropped."""


class StoreFault(StrEnum):
    """What is wrong with a store, in a word that counters and alerts can use."""

    UNREACHABLE = "unreachable"
    """Nobody answers, or the file cannot be opened."""

    SLOW = "slow"
    """No answer within the bound; whether a write happened is unknown."""

    FULL = "full"
    """It takes no more writes; reads still work."""

    DENIED = "denied"
    """Wrong password, or no right to do this."""

    FOREIGN = "foreign"
    """Contents of another program, or of another version of this one."""

    LOST = "lost"
    """Its contents are not those that this balancer started with: it was emptied or replaced."""

    DAMAGED = "damaged"
    """Contents that no release of ours wrote."""

    CONFLICT = "conflict"
    """Somebody else wrote in between."""


class StoreError(RuntimeError):
    """The store cannot be used; the message names it and says what to do."""

    def __init__(self, message: str, *, fault: StoreFault = StoreFault.UNREACHABLE) -> None:
        super().__init__(message)
        self.fault = fault


class StoreConflictError(StoreError):
    """Somebody else wrote in between: read again before deciding anew."""

    def __init__(self, message: str) -> None:
        super().__init__(message, fault=StoreFault.CONFLICT)


class TermOverError(StoreConflictError):
    """A balancer of a higher term has taken over; `highest_term` is its."""

    def __init__(self, *, store: str, term: int, highest_term: int) -> None:
        super().__init__(
            f"{store}: term {term} is over, a balancer of term {highest_term} has taken over"
        )
        self.highest_term = highest_term


class Store(Protocol):
    """Memory of the balancer. Every method may raise `StoreError`; writes are durable on return.

    Every write carries a term and raises `TermOverError` if a higher one wrote before.
    """

    async def highest_term(self) -> int:
        """The highest term that ever wrote; 0 in a new store."""

    async def fence(self, *, term: int) -> None:
        """From now on refuse lower terms: what a new leader does before it reads anything."""

    async def pools(self) -> tuple[str, ...]:
        """Names of all pools the store knows, sorted."""

    async def put_proposed(self, pool: str, layout: Layout, *, term: int) -> None:
        """Remember a layout before anybody is asked to stage it.

        Raises:
            StoreConflictError: its generation is not above the highest ever used (saying the very
                same layout again is no conflict), or a higher term wrote before.
        """

    async def commit(self, pool: str, generation: int, *, previous: int | None, term: int) -> None:
        """Make a proposed layout the committed one, if `previous` still is (None: none is).

        Raises:
            StoreConflictError: another generation is committed, or this one was never proposed.
        """

    async def adopt(self, pool: str, layout: Layout, *, term: int) -> None:
        """Commit the layout that all ranks report to run, whatever was proposed or committed."""

    async def committed(self, pool: str) -> Layout | None:
        """The layout that all ranks were last known to run."""

    async def proposed(self, pool: str) -> Layout | None:
        """The newest layout above the committed one: a rollout that did not come to its end."""

    async def layout(self, pool: str, generation: int) -> Layout | None:
        """A layout that was proposed or adopted and is still kept."""

    async def next_generation(self, pool: str) -> int:
        """The number after the highest ever used; 1 for a new pool. Reserves nothing."""

    async def put_membership(self, pool: str, members: EpochMembers, *, term: int) -> None:
        """Remember an epoch, which must not be below the latest.

        Raises:
            StoreConflictError: the store has a later epoch.
        """

    async def membership(self, pool: str) -> EpochMembers | None:
        """The latest epoch."""

    async def put_average(self, pool: str, name: str, record: AverageRecord, *, term: int) -> None:
        """Remember a moving average by its name, for example "slow"."""

    async def average(self, pool: str, name: str) -> AverageRecord | None:
        """A moving average as it was put last."""

    async def add_decision(
        self, pool: str, decision: DecisionRecord, *, term: int
    ) -> DecisionRecord:
        """Append a decision; returns it with its sequence number."""

    async def decisions(self, pool: str, *, limit: int) -> tuple[DecisionRecord, ...]:
        """The newest decisions, newest first, at most `limit` of at most MAX_DECISIONS."""

    async def commits(self, pool: str) -> tuple[int, ...]:
        """Generations that were committed and whose layouts are still kept, ascending."""

    async def add_audit(
        self, pool: str, record: AuditRecord, *, hold: Hold | None, term: int
    ) -> AuditRecord:
        """Append an order and, in the same step, set what the pool is held to (None: as before).

        Returns it with its sequence number.
        """

    async def audit(self, pool: str, *, limit: int) -> tuple[AuditRecord, ...]:
        """The newest orders, newest first, at most `limit` of at most MAX_AUDIT_ENTRIES."""

    async def hold(self, pool: str) -> Hold:
        """What operators hold the pool to; nothing for a new pool."""

    async def close(self) -> None:
        """Release the store; no method may be called after."""

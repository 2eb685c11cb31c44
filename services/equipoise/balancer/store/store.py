"""`Store`: what outlives a balancer.

A store holds, for each pool: layouts (proposed before any rank stages them, committed once all
ranks run them), the highest generation ever used, the members of the epoch, moving averages,
decisions, audit records, and what operators hold the pool to. `term` is the fencing number of the
balancer that writes: once a store has seen a higher term, it rejects lower ones, so that a balancer
that lost the leadership cannot undo its successor's writes.
"""

from enum import StrEnum
from typing import Any, Protocol

from equipoise.planning.layout import Layout
from equipoise.pool.records import (
    AuditRecord,
    AverageRecord,
    DecisionRecord,
    EpochMembers,
    ForgottenRecords,
    Hold,
    PoolMemory,
)
from equipoise.wire.checks import MAX_TERM

MAX_DECISIONS = 1000
"""Decisions kept for each pool; older ones are dropped."""

MAX_AUDIT_ENTRIES = 1000
"""Audit records kept for each pool; older ones are dropped."""

MAX_LAYOUTS = 64
"""Layouts kept for each pool in addition to the committed one; older ones are dropped."""


class StoreFault(StrEnum):
    """What is wrong with a store, for counters and alerts."""

    UNREACHABLE = "unreachable"
    """It cannot be reached, or the file cannot be opened."""

    BROKEN = "broken"
    """The connection ended without an answer; whether a write happened is unknown."""

    SLOW = "slow"
    """No answer within the timeout; whether a write happened is unknown."""

    FULL = "full"
    """It accepts no more writes; reads still work."""

    DENIED = "denied"
    """Wrong password, or not permitted."""

    FOREIGN = "foreign"
    """Contents of another program, or of another version of Equipoise."""

    LOST = "lost"
    """Its contents are not those that this balancer started with: it was emptied or replaced."""

    DAMAGED = "damaged"
    """Contents that no release wrote."""

    CONFLICT = "conflict"
    """Another balancer wrote in between."""


class StoreError(RuntimeError):
    """The store cannot be used; the message names it and the remedy."""

    def __init__(self, message: str, *, fault: StoreFault = StoreFault.UNREACHABLE) -> None:
        super().__init__(message)
        self.fault = fault


class UnreadablePoolError(StoreError):
    """Records of one pool cannot be read; the message names pool and record. Others can be."""

    def __init__(self, message: str) -> None:
        super().__init__(message, fault=StoreFault.DAMAGED)


class StoreConflictError(StoreError):
    """Another balancer wrote in between: read again before deciding."""

    def __init__(self, message: str) -> None:
        super().__init__(message, fault=StoreFault.CONFLICT)


class StoreAheadError(StoreConflictError):
    """The store has audit records that this balancer does not know: read them first."""


class TermOverError(StoreConflictError):
    """A balancer of a higher term, `highest_term`, has taken over.

    If that is not above the term itself, one may have: the store failed over and may have lost it.
    """

    def __init__(self, *, store: str, term: int, highest_term: int) -> None:
        cause = (
            f"a balancer of term {highest_term} has taken over"
            if highest_term > term
            else "the store failed over and may have lost a later one"
        )
        super().__init__(f"{store}: term {term} is over, {cause}")
        self.highest_term = highest_term


def checked_term(found: Any) -> int:
    """Return a stored term, which may be written as digits.

    Raises:
        ValueError: no leader can have written it.
    """
    if isinstance(found, bytes):
        found = int(found)
    if type(found) is not int or not 0 <= found <= MAX_TERM:
        raise ValueError(f"term {found} is not from 0 to {MAX_TERM}")
    return found


class Store(Protocol):
    """Storage of the balancer. Every method may raise `StoreError`; writes are durable on return.

    A method of one pool raises `UnreadablePoolError` if it meets a record of that pool that no
    release wrote, or that has a value out of range; it changes nothing then.

    A term begins with its fence. Every other write carries its term and raises `TermOverError` if
    another one was fenced since, or if the store failed over.

    If the store was emptied or replaced, every method fails with `StoreFault.LOST` until the caller
    continues with what it finds, by `reopen`.
    """

    def reopen(self) -> None:
        """Continue with whatever contents the store has: the caller reads everything again."""

    async def highest_term(self) -> int:
        """The highest term that was ever fenced; 0 in a new store."""

    async def fence(self, *, term: int) -> None:
        """Reject all other terms from now on; a new leader does so before it reads anything.

        Raises:
            TermOverError: the store has seen this term, or a higher one.
        """

    async def pools(self) -> tuple[str, ...]:
        """Names of all pools the store knows, sorted."""

    async def forget(self, pool: str, *, term: int) -> None:
        """Drop everything about a pool; its workers' reports bring back what they still run."""

    async def put_proposed(self, pool: str, layout: Layout, *, term: int) -> None:
        """Record a layout before any rank is asked to stage it.

        Raises:
            StoreConflictError: its generation is not above the highest ever used (writing the
                same layout again is not a conflict), or a higher term wrote before.
        """

    async def commit(self, pool: str, generation: int, *, previous: int | None, term: int) -> None:
        """Make a proposed layout the committed one, if `previous` still is (None: none is).

        Raises:
            StoreConflictError: another generation is committed, or this one was never proposed.
        """

    async def adopt(self, pool: str, layout: Layout, *, term: int) -> None:
        """Commit the layout that all ranks report to run, whatever was proposed or committed."""

    async def recall(self, pool: str) -> PoolMemory:
        """What is known of a pool, all of one moment; an empty memory if nothing is."""

    async def layout(self, pool: str, generation: int) -> Layout | None:
        """A layout that was proposed or adopted and is still kept."""

    async def put_membership(self, pool: str, members: EpochMembers, *, term: int) -> None:
        """Record the members of an epoch, which must not be below the latest.

        Raises:
            StoreConflictError: the store has a later epoch.
        """

    async def put_average(self, pool: str, name: str, record: AverageRecord, *, term: int) -> None:
        """Record a moving average by name, for example "slow"."""

    async def add_decision(
        self, pool: str, decision: DecisionRecord, *, term: int
    ) -> DecisionRecord:
        """Append a decision; returns it with its sequence number."""

    async def decisions(self, pool: str, *, limit: int) -> tuple[DecisionRecord, ...]:
        """The newest decisions, newest first, at most `limit` of at most MAX_DECISIONS."""

    async def commits(self, pool: str) -> tuple[int, ...]:
        """Generations that were committed and whose layouts are still kept, ascending."""

    async def add_audit(
        self, pool: str, record: AuditRecord, *, hold: Hold | None, after: int, term: int
    ) -> AuditRecord:
        """Append an audit record and, in the same write, set the pool's hold (None: as before).

        `after` is the number of the latest record that the caller knows; 0 for none. Returns the
        record with its sequence number.

        Raises:
            StoreAheadError: the latest one is another.
        """

    async def audit(self, pool: str, *, limit: int) -> tuple[AuditRecord, ...]:
        """The newest audit records, newest first, at most `limit` of at most MAX_AUDIT_ENTRIES."""

    async def restore(self, pool: str, lost: ForgottenRecords, *, term: int) -> None:
        """Write back records that this store lost, under their numbers, in one write.

        The decision, the epoch and the highest generation are skipped if the store has one of the
        same or a higher number.

        Raises:
            StoreAheadError: the latest audit record is not `lost.after`.
        """

    async def close(self) -> None:
        """Close the store; no method may be called after this."""

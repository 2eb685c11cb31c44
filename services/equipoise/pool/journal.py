"""`Journal`: what the store has recorded of a pool, and what it has yet to record."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from equipoise.planning.policy import StoreDown
from equipoise.pool.effects import (
    Chain,
    Write,
    WriteAdopted,
    WriteAudit,
    WriteDecision,
    WriteMembership,
    WriteProposed,
)
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import (
    MAX_AUDIT,
    AuditRecord,
    DecisionRecord,
    ForgottenRecords,
    Hold,
    PoolMemory,
)

MAX_LATE = 100
"""Decisions kept for a store that accepts no writes; older ones are dropped."""


class Journal:
    """Decisions, audit records, the hold and the numbers of one pool, and whether its store works.

    The numbers are those that the store has recorded: none is used before that.
    """

    def __init__(self, policy: PoolPolicy, memory: PoolMemory) -> None:
        self._policy = policy
        self.hold = memory.hold
        """What an operator holds the pool to."""
        self._audit = deque(memory.audit[:MAX_AUDIT], maxlen=MAX_AUDIT)
        self.last_decision = memory.last_decision
        """The latest decision."""
        self.members = memory.members
        """The latest epoch."""
        self._next_generation = memory.next_generation
        self._late: deque[DecisionRecord] = deque(maxlen=MAX_LATE)
        self.store_fault = ""
        """Why the store accepted no write last; empty while it works."""

    @property
    def audit(self) -> Sequence[AuditRecord]:
        """The latest audit records, newest first."""
        return self._audit

    @property
    def _latest(self) -> int:
        """Number of the latest audit record; 0 for none."""
        return self._audit[0].sequence if self._audit else 0

    def note_written(self, write: Write) -> None:
        """The store accepted a write."""
        self.store_fault = ""
        match write:
            case WriteProposed() | WriteAdopted():
                self._next_generation = max(self._next_generation, write.layout.generation + 1)
            case WriteMembership():
                self.members = write.members
            case _:
                pass

    def note_decision(self, record: DecisionRecord) -> None:
        """A decision is recorded."""
        self.last_decision = record

    def brought_up_to_date(self, write: WriteAudit) -> WriteAudit:
        """The record as it follows those written since it was requested, with its hold."""
        hold = write.hold
        if hold is not None:
            hold = self.hold.changed_as(write.hold_before, hold)
        return replace(write, hold=hold, after=self._latest)

    def note_audit(self, write: WriteAudit) -> None:
        """An audit record is written, and with it what the pool is held to."""
        self._audit.appendleft(write.record)
        if write.hold is not None:
            self.hold = write.hold

    def note_stored(self, stored: PoolMemory) -> bool:
        """The store has this. Returns whether it has requests that it did not confirm in time."""
        if not stored.audit or stored.audit[0].sequence <= self._latest:
            return False
        self._audit = deque(stored.audit[:MAX_AUDIT], maxlen=MAX_AUDIT)
        self.hold = stored.hold
        return True

    def note_failed(self, lost: Chain, reason: str) -> None:
        """The store did not accept a write; `lost` are that and what depended on it.

        `reason` is what is wrong with the store; empty if it works.
        """
        in_memory = self._policy.values.store_down is StoreDown.MEMORY
        fault = (
            f"{reason}; nothing is switched until the store works, planning "
            f"{'continues in memory' if in_memory else 'is paused'}"
        )
        self.store_fault = fault if reason else ""
        for effect in lost:
            if isinstance(effect, WriteDecision):
                self.last_decision = effect.record
                self._late.append(effect.record)

    def forgotten_by(self, stored: PoolMemory) -> ForgottenRecords | None:
        """What the store has lost of these records, as it was read; None if nothing.

        A record written after the loss may have the number of a lost one, so records are compared
        by their contents. Epochs and generations are never reused, so the highest count.
        """
        is_ours = self._is_hold_ours(stored.audit)
        audit = self._lost_audit(stored)
        decision = self.last_decision
        if decision is not None and not _is_decision_lost(decision, stored.last_decision):
            decision = None
        is_behind = self._next_generation > stored.next_generation
        members = self.members
        if members is not None and stored.members is not None:
            members = members if members.epoch > stored.members.epoch else None
        lost = ForgottenRecords(
            after=stored.audit[0].sequence if stored.audit else 0,
            audit=audit,
            hold=self.hold if is_ours and (audit or self._differs(stored.hold)) else None,
            decision=decision,
            members=members,
            next_generation=self._next_generation if is_behind else 0,
        )
        return lost if lost.kinds else None

    def is_explained_by(self, stored: Sequence[AuditRecord]) -> bool:
        """Whether these latest records of a store show what it lost, and what is unknown here.

        They do if the latest or the oldest one here is among them, under its number.
        """
        mine = self._audit
        return not mine or not stored or mine[0] in stored or mine[-1] in stored

    def _is_hold_ours(self, stored: Sequence[AuditRecord]) -> bool:
        """Whether the hold here is at least as new as that of a store with these latest records.

        A store that lost its last writes has an earlier record of this history as its latest, or
        none. If an accepted one is unknown here, another balancer led since the loss, or the store
        went back to what it had before this one led: neither clocks nor numbers of two balancers
        say whose hold is newer, and that in the store counts. So it does if one may be out of
        sight. Records below our oldest one count only if the store lacks that, or has it under
        another number.
        """
        known = {_request(one) for one in self._audit}
        begin = self._audit[-1].sequence if self._audit and self._audit[-1] in stored else 0
        since = [one for one in stored if one.sequence > begin]
        in_sight = not stored or stored[-1].sequence <= begin + 1
        return in_sight and not any(one.accepted and _request(one) not in known for one in since)

    def _lost_audit(self, memory: PoolMemory) -> tuple[AuditRecord, ...]:
        """Records that the store lacks, oldest first; taken numbers are replaced by the next."""
        stored = memory.audit
        oldest, latest = (stored[-1].sequence, stored[0].sequence) if stored else (0, 0)
        number, lost = max(latest, memory.last_audit), []
        known = {_request(one) for one in stored}
        for one in reversed(self._audit):
            if one.sequence >= oldest and _request(one) not in known:
                number = max(number + 1, one.sequence)
                lost.append(replace(one, sequence=number))
        return tuple(lost)

    def _differs(self, hold: Hold) -> bool:
        ours = self.hold
        return (hold.reason, hold.pinned_generation) != (ours.reason, ours.pinned_generation)

    def dropped_by(self, stored: PoolMemory) -> str:
        """The hold that ends because the store lost its request and has others; else empty."""
        audit, mine = stored.audit, self._audit
        if not audit or not mine or mine[0] in audit or stored.hold.reason == self.hold.reason:
            return ""
        is_later = audit[-1].sequence > self._latest
        return "" if is_later or self._is_hold_ours(audit) else self.hold.reason

    def late_decisions(self) -> Chain:
        """Decisions that the store missed, once it works again."""
        if self.store_fault or not self._late:
            return ()
        late = tuple(WriteDecision(record=record) for record in self._late)
        self._late.clear()
        return late


def _request(record: AuditRecord) -> AuditRecord:
    """What a record is about, whatever its number."""
    return replace(record, sequence=0)


def _is_decision_lost(known: DecisionRecord, stored: DecisionRecord | None) -> bool:
    """Whether a store whose latest decision is `stored` once had the decision `known`."""
    if stored is None:
        return known.sequence > 0
    return known.sequence > stored.sequence and known.time_unix_s >= stored.time_unix_s

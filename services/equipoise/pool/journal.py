"""`Journal`: what the store has recorded of a pool, and what it has yet to record."""

from collections import deque
from collections.abc import Sequence

from equipoise.planning.policy import StoreDown
from equipoise.pool.effects import Chain, WriteAudit, WriteDecision
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import MAX_AUDIT, AuditRecord, DecisionRecord, PoolMemory

MAX_LATE = 100
"""Decisions kept for a store that accepts no writes; older ones are dropped."""


class Journal:
    """Decisions, audit records and the hold of one pool, and whether its store works."""

    def __init__(self, policy: PoolPolicy, memory: PoolMemory) -> None:
        self._policy = policy
        self.hold = memory.hold
        """What an operator holds the pool to."""
        self._audit = deque(memory.audit, maxlen=MAX_AUDIT)
        self.last_decision = memory.last_decision
        """The latest decision."""
        self._late: deque[DecisionRecord] = deque(maxlen=MAX_LATE)
        self.store_fault = ""
        """Why the store accepted no write last; empty while it works."""

    @property
    def audit(self) -> Sequence[AuditRecord]:
        """The latest audit records, newest first."""
        return self._audit

    def note_written(self) -> None:
        """The store accepted a write."""
        self.store_fault = ""

    def note_decision(self, record: DecisionRecord) -> None:
        """A decision is recorded."""
        self.last_decision = record

    def note_audit(self, write: WriteAudit) -> None:
        """An audit record is written, and with it what the pool is held to."""
        self._audit.appendleft(write.record)
        if write.hold is not None:
            self.hold = write.hold

    def note_failed(self, lost: Chain, reason: str) -> None:
        """The store did not accept a write; `lost` are that and what depended on it."""
        in_memory = self._policy.values.store_down is StoreDown.MEMORY
        self.store_fault = (
            f"{reason}; nothing is switched until the store works, planning "
            f"{'continues in memory' if in_memory else 'is paused'}"
        )
        for effect in lost:
            if isinstance(effect, WriteDecision):
                self.last_decision = effect.record
                self._late.append(effect.record)

    def late_decisions(self) -> Chain:
        """Decisions that the store missed, once it works again."""
        if self.store_fault or not self._late:
            return ()
        late = tuple(WriteDecision(record=record) for record in self._late)
        self._late.clear()
        return late

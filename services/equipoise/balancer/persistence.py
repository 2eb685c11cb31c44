"""Reads a pool from the store, and writes what the pool wants recorded."""

import logging
from dataclasses import replace

from equipoise.balancer.pool_log import PoolLog
from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    Store,
    UnreadablePoolError,
)
from equipoise.pool.effects import (
    Write,
    WriteAdopted,
    WriteAudit,
    WriteAverage,
    WriteCommitted,
    WriteDecision,
    WriteMembership,
    WriteProposed,
)
from equipoise.pool.journal import Journal
from equipoise.pool.records import PoolMemory
from equipoise.telemetry.logs import about

_log = logging.getLogger(__name__)


async def recall(store: Store, pool: str, *, known: Journal | None) -> PoolMemory:
    """Read a pool, with all its audit records if the latest do not explain those that are `known`.

    Raises:
        StoreError: the store cannot be used.
    """
    memory = await store.recall(pool)
    if known is None or known.is_explained_by(memory.audit):
        return memory
    try:
        kept = await store.audit(pool, limit=MAX_AUDIT_ENTRIES)
    except UnreadablePoolError:
        return memory  # An old record is damaged: then the hold in the store counts.
    older = (one for one in kept if one.sequence < memory.audit[-1].sequence)
    return replace(memory, audit=(*memory.audit, *older))


async def restore(store: Store, pool: str, *, known: Journal | None, term: int) -> PoolMemory:
    """Read a pool, and write back what the store lost of the records that are `known`.

    Raises:
        StoreAheadError: another record came in between.
        StoreError: the store cannot be used.
    """
    memory = await recall(store, pool, known=known)
    if known is None:
        return memory
    warn_of_dropped(pool, known, memory)
    lost = known.forgotten_by(memory)
    if lost is None:
        return memory
    await store.restore(pool, lost, term=term)
    _log.warning(
        "the store had lost records of pool %s (%s): wrote them back",
        *(pool, ", ".join(lost.kinds)),
        extra=about(pool=pool, term=term),
    )
    return lost.added_to(memory)


def warn_of_dropped(pool: str, known: Journal, stored: PoolMemory) -> None:
    """Log the hold that this balancer knows and that gives way to what the store has."""
    if hold := known.dropped_by(stored):
        _log.warning(
            "pool %s is no longer %s: the store lost that, and has other accepted requests: "
            "repeat it if it still applies",
            *(pool, hold),
            extra=about(pool=pool),
        )


async def write_to(store: Store, write: Write, *, pool: str, term: int, log: PoolLog) -> Write:
    """Write; a record comes back with the number that the store gave it.

    Raises:
        StoreError: the store did not accept it.
    """
    match write:
        case WriteProposed():
            await store.put_proposed(pool, write.layout, term=term)
        case WriteCommitted(generation=generation):
            await store.commit(pool, generation, previous=write.previous, term=term)
            log.info("generation %d is committed", generation, extra=about(generation=generation))
        case WriteAdopted():
            await store.adopt(pool, write.layout, term=term)
        case WriteMembership(members=members):
            await store.put_membership(pool, members, term=term)
            fields = about(epoch=members.epoch)
            log.info("epoch %d: %s", members.epoch, ", ".join(members.workers), extra=fields)
        case WriteAverage():
            await store.put_average(pool, write.name, write.record, term=term)
        case WriteDecision():
            record = await store.add_decision(pool, write.record, term=term)
            fields = about(generation=record.base_generation)
            verdict = "yes" if record.accepted else "no"
            log.info("decision %d: %s: %s", record.sequence, verdict, record.reason, extra=fields)
            return replace(write, record=record)
        case WriteAudit():
            entry = await store.add_audit(
                pool, write.record, hold=write.hold, after=write.after, term=term
            )
            log.info(
                "audit record %d: %s: %s: %s: %s",
                *(entry.sequence, entry.who, entry.what),
                *("accepted" if entry.accepted else "rejected", entry.outcome),
            )
            return replace(write, record=entry)
    return write
